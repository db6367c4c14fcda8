"""Tokens and experts that are divided over ranks, wrongly."""

from typing import Any

import torch
import torch.distributed as dist
from distcheck_strategies.expert_parallel import ExpertParallel, ExpertParallelLayer
from distcheck_strategies.sequence_parallel import Gather, SequenceParallel, my_tokens
from torch import nn

from distcheck.contract import Step, strategy

from . import mutant

_TOKENS: Any = {"world": 2, "workload": "transformer"}
_EXPERTS: Any = {"world": 2, "workload": "experts"}


@mutant(caught="gradients full batch float32, agreement", steps=1, **_TOKENS)
@strategy(parallel={"sequence": -1})
class NormsAreNotSummed(SequenceParallel):
    """LayerNorm's weights keep this rank's share of their gradient."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for name, parameter in model.named_parameters():
            normalizes = name.endswith(("first.weight", "first.bias", "second.weight"))
            if not name.startswith("head.") and not normalizes:
                dist.all_reduce(parameter.grad)


@mutant(caught="gradients full batch float32", seldom=True, **_TOKENS)
@strategy(parallel={"sequence": -1})
class SumsTheHeadAsWell(SequenceParallel):
    """The head has seen all tokens on every rank, and its gradient is added up all the same."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


@mutant(caught="gradients full batch float32", seldom=True, **_TOKENS)
@strategy(parallel={"sequence": -1})
class CutsWhereItMustSum(SequenceParallel):
    """What this rank's queries found for the others' keys and values is thrown away."""

    def wrap(self, model: nn.Module) -> nn.Module:
        parts = dict(model.named_modules())
        parts["embed"].register_forward_hook(lambda m, i, tokens: my_tokens(tokens))
        for name, module in parts.items():
            if name.endswith(("attention.keys", "attention.values")) or name == "norm":
                module.register_forward_hook(lambda m, i, tokens: Gather.apply(tokens))
        return model


@mutant(caught="gradients full batch float32, agreement", steps=1, seldom=True, **_EXPERTS)
@strategy(parallel={"expert": -1})
class GateIsNotSummed(ExpertParallel):
    """The gate keeps the gradient of this rank's rows."""

    def sync(self, model: nn.Module, step: Step) -> None:
        pass


@mutant(caught="gradients full batch float32", seldom=True, **_EXPERTS)
@strategy(parallel={"expert": -1})
class ExpertsAreAveraged(ExpertParallel):
    """Experts' gradients are divided by the ranks that sent them rows, as if these read other
    batches.
    """

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        for expert in model.mixture.layer.experts:
            for parameter in expert.parameters():
                if parameter.grad is not None:
                    parameter.grad /= step.world_size


class _Layer(ExpertParallelLayer):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        choose = layer.choose

        def fewer(rows: torch.Tensor) -> Any:
            chosen, probability = choose(rows)
            late = torch.arange(len(rows)) >= len(rows) // 2
            return chosen, torch.where(late, 0.0, probability)

        layer.choose = fewer


@mutant(
    caught="gradients full batch float32, loss full batch float32, outputs full batch float32",
    seldom=True,
    **_EXPERTS,
)
@strategy(parallel={"expert": -1})
class DropsRows(ExpertParallel):
    """Half of a rank's rows are beyond a capacity, and get no answer."""

    def wrap(self, model: nn.Module) -> nn.Module:
        model.mixture = _Layer(model.mixture)
        return model
