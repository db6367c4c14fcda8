"""Sequence parallelism, by hand: each rank has some of a sample's tokens, and the whole model.

Most of a transformer works on each token by itself. Attention needs the keys and values of all
tokens: they are gathered, and in backward each rank's share of their gradient is added up and cut
again. Before the mean over the tokens they are gathered once more; from there on every rank
computes the same, so backward only cuts.

A parameter that is used on tokens has seen only this rank's: its gradient is a share of a sum over
all ranks, LayerNorm's weights included.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step, strategy


def my_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of [n, tokens, ...]."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def all_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's tokens, in their order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=1)


class Gather(torch.autograd.Function):
    """Forward: all tokens. Backward: this rank's, of one gradient that every rank has whole."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor) -> torch.Tensor:
        """[n, tokens / W, width] -> [n, tokens, width]."""
        return all_tokens(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The cut."""
        return my_tokens(gradient)


class GatherForAttention(Gather):
    """The same, where each rank's queries give a share of the gradient: the shares are added up."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The sum, then the cut."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return my_tokens(total)


@strategy(parallel={"sequence": -1}, workload="transformer")
class SequenceParallel:
    """For the workload `transformer`, whose number of tokens the number of ranks must divide."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cuts what `embed` returns, and gathers where tokens are needed together."""
        parts = dict(model.named_modules())
        if not {"embed", "norm", "head", "blocks"} <= parts.keys():
            raise ValueError("it has no embed, blocks, norm and head; give --workload transformer")
        tokens, world = parts["embed"].position.shape[0], dist.get_world_size()
        if tokens % world:
            raise ValueError(f"{tokens} tokens cannot be divided by {world} ranks")
        parts["embed"].register_forward_hook(lambda module, inputs, outputs: my_tokens(outputs))
        for name, module in parts.items():
            if name.endswith(("attention.keys", "attention.values")):
                module.register_forward_hook(lambda m, i, tokens: GatherForAttention.apply(tokens))
        parts["norm"].register_forward_hook(lambda m, i, tokens: Gather.apply(tokens))
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        """Adds up the shares; `head` has seen the mean of all tokens, on every rank."""
        for name, parameter in model.named_parameters():
            if not name.startswith("head.") and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
