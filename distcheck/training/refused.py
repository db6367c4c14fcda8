"""Code that trains in a way that is not compared, found where it begins: no defect, no verdict.

Parameters are compared by name, and gradients after backward. Code that gives the model other
parameters (weight_norm), or steps while backward goes on and drops the gradients, may be right.
"""

from collections.abc import Iterable

import torch
from torch import nn

from distcheck.errors import UsageError


def refuse_other_names(strategy: str, before: Iterable[str], model: nn.Module) -> None:
    """Raises UsageError where a model has parameters under new names in place of its own."""
    known, after = list(before), [name for name, _ in model.named_parameters()]
    gone = [name for name in known if name not in after]
    new = [name for name in after if name not in known]
    if gone and new:
        raise UsageError(
            f"{strategy} replaced parameters of the model: {gone[0]} is gone, and {new[0]} is new "
            f"({len(gone)} are gone in all). Parameters are compared by name: build such a model "
            "in a workload (--workload FILE.py:NAME), and give the code that synchronises it"
        )


def lengths(model: nn.Module) -> list[float]:
    """A number for each parameter that trains, which another value of it hardly has. Pieces that
    ranks put together (DTensor) and numbers of one byte are left out.
    """
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype.itemsize > 1]
    with torch.no_grad():
        return [float(p.norm()) for p in trained if not hasattr(p, "full_tensor")]


def refuse_steps_in_backward(strategy: str, before: list[float], model: nn.Module) -> None:
    """Raises UsageError where backward moved parameters and left no gradient at all, as hooks do
    that take the optimizer's step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(p.grad is not None for p in trained) or not trained or lengths(model) == before:
        return
    raise UsageError(
        f"{strategy} updates the parameters in backward and leaves no gradients, so they are "
        "never seen; leave out the step and the zero_grad() of its hooks, and give the part that "
        "synchronises: the loop takes the optimizer's step after backward"
    )
