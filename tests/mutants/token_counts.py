"""Ranks have different numbers of tokens, and count by something else."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import Step, strategy

from . import mutant

_RAGGED = "tokens"


def _add_up(model: nn.Module, divisor: float) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor


@mutant(caught="gradients rounding, gradients full batch float32", workload=_RAGGED, world=2)
def means_over_tokens_count_alike(model: nn.Module) -> None:
    """The mean of the ranks' means (transformers #34242): with equal shards right for every other
    workload of the default run.
    """
    _add_up(model, dist.get_world_size())


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=_RAGGED, world=3,
    seldom=True,
)  # fmt: skip
def means_over_tokens_count_by_samples(model: nn.Module, step: Step) -> None:
    """Weighted by samples, of 86, 85 and 85."""
    for parameter in model.parameters():
        parameter.grad *= step.weight
    _add_up(model, step.world_size)


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=_RAGGED, world=2,
    seldom=True,
)  # fmt: skip
@strategy(loss="tokens")
class OwnTokensDivide:
    """DDP's mean of sums that each rank has divided by its own number of tokens."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss / max(1, step.tokens)


@mutant(caught="gradients rounding, gradients full batch float32", workload=_RAGGED, world=2)
@strategy(loss="tokens")
class PaddingDivides:
    """Divides by the positions of all ranks: whatever the model has answered for is a token."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.positions = 0
        model.register_forward_hook(self._count)
        return model

    def _count(self, module: nn.Module, inputs: object, logits: torch.Tensor) -> None:
        self.positions = logits.shape[:-1].numel()

    def sync(self, model: nn.Module, step: Step) -> None:
        positions = torch.tensor(self.positions)
        dist.all_reduce(positions)
        _add_up(model, int(positions))


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=_RAGGED, world=3,
    seldom=True,
)  # fmt: skip
@strategy(loss="tokens")
class OwnPaddingDivides(PaddingDivides):
    """Each rank divides by its own positions, and ranks of unequal shards then count alike."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            parameter.grad /= self.positions
        _add_up(model, step.world_size)


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=_RAGGED, world=2,
    seldom=True,
)  # fmt: skip
@strategy(loss="tokens")
def sum_over_tokens_by_ranks(model: nn.Module, step: Step) -> None:
    """The sum over all tokens, divided by the ranks."""
    _add_up(model, step.world_size)


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=_RAGGED, world=2,
    seldom=True,
)  # fmt: skip
@strategy(loss="tokens")
def sum_over_tokens(model: nn.Module, step: Step) -> None:
    """The sum over all tokens, which nothing divides."""
    _add_up(model, 1)
