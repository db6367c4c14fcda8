"""Gradients that are complete on one rank only: the one whose optimizer updates the parameter.

ZeRO-2 reduces a gradient to its owner. What the other ranks hold is their own gradient or none, and
no step reads it. So the owner's gradient counts; what the others hold is recorded beside it, to say
where a gradient is that its owner has not.
"""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.errors import UsageError
from distcheck.training.optimizers import innermost
from distcheck.training.whole_tensors import dense

_SHOWN = 3


class Owners:
    """Which rank's optimizer updates each of a model's parameters. All ranks make one at once."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = list(model.named_parameters())
        groups = getattr(innermost(optimizer), "param_groups", ())
        held = {id(p) for group in groups for p in group["params"]}
        device = next((p.device for _, p in named), torch.device("cpu"))
        self._device = device
        mine = torch.tensor([id(p) in held for _, p in named], dtype=torch.long, device=device)
        holders, owner = mine.clone(), mine * dist.get_rank()
        dist.all_reduce(holders)
        dist.all_reduce(owner)
        counts = dict(zip((name for name, _ in named), holders.tolist(), strict=True))
        self._check({name: counts[name] for name, p in named if p.requires_grad})
        pairs = zip(named, owner.tolist(), strict=True)
        self.of = {name: int(o) for (name, _), o in pairs if counts[name] == 1}

    @staticmethod
    def _check(holders: dict[str, int]) -> None:
        wrong = [f"{name} ({count})" for name, count in holders.items() if count != 1]
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise UsageError(
                'the strategy promises gradients="owner", so each parameter must be in the '
                "optimizer of exactly one rank; in the optimizers of so many ranks are: "
                f"{', '.join(wrong[:_SHOWN])}{more}"
            )

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        """What this rank holds, by name, in the form that the parameters have."""
        named = [(name, p) for name, p in model.named_parameters() if name in self.of]
        return {name: _as_it_is(dense(p.grad), p) for name, p in named}


def _as_it_is(gradient: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor | None:
    """In the parameter's dtype; None where a part of the gradient is left, or nothing."""
    if gradient is None or gradient.shape != parameter.shape:
        return None
    return gradient.to(parameter.dtype)
