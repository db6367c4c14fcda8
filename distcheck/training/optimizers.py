"""An optimizer's state by name: reading it for a trace, and restoring it into a rebuilt optimizer.

Most of it is per-parameter tensors. Some optimizers also keep Python numbers: a step count per
parameter, or values in their groups that they count or learn (`k` of schedule-free optimizers, a
built-in warm-up). These are recorded as scalar (0-d) tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_GROUP = "param_groups["


def is_group_number(name: str) -> bool:
    """Return True for the name of a number in a group, False for state of a parameter."""
    return name.startswith(_GROUP)


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for an optimizer class defined by torch, whose state is known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def tensors_and_numbers(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the optimizer's tensors and numbers, as `<parameter>/<state key>`, in fixed order."""
    optimizer = innermost_optimizer(optimizer)
    tensors, numbers = {}, {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key, value in sorted(state.items(), key=_by_key):
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = _step_count(value) if key == "step" else value
            elif (number := _as_tensor(value)) is not None:
                numbers[f"{name}/{key}"] = number
    return tensors, numbers


def _step_count(steps: torch.Tensor) -> torch.Tensor:
    """Return a step count in the dtype of torch's non-fused implementations: with a default dtype
    of float64 that is float64, but float32 in fused ones.
    """
    fused = steps.dtype == torch.float32 and torch.get_default_dtype() == torch.float64
    return steps.double() if fused and steps.dim() == 0 else steps


def group_numbers(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all numbers in its groups, including learning rates, as `param_groups[<n>]/<key>`."""
    numbers = {}
    groups = getattr(
        innermost_optimizer(optimizer), "param_groups", ()
    )  # user-defined ones may have none
    for index, group in enumerate(groups):
        for key, value in sorted(group.items(), key=_by_key):
            if (number := _as_tensor(value)) is not None:
                numbers[f"{_GROUP}{index}]/{key}"] = number
    return numbers


def innermost_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the state, inside ZeroRedundancyOptimizer or others."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


class OptimizerProxy:
    """Object that replaces an optimizer in the loop. It has the groups and state of the inner
    optimizer, unless a subclass overrides them.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def state(self) -> Any:
        return self._inner.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups whose learning rates the workload sets."""
        groups: list[dict[str, Any]] = self._inner.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none=set_to_none)


def _by_key(item: tuple[object, object]) -> str:
    return str(item[0])


def _as_tensor(value: object) -> torch.Tensor | None:
    """Return a Python number without rounding as a tensor; None for any other value."""
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else None


def restore_state_value(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    name: str,
    value: torch.Tensor,
    *,
    is_number: bool,
) -> None:
    """Set the state `name` of an optimizer over `parameters` to a value from a trace."""
    optimizer = innermost_optimizer(optimizer)
    owner, _, key = name.rpartition("/")
    if is_group_number(name):
        groups = optimizer.param_groups
        number = int(owner.removeprefix(_GROUP).removesuffix("]"))
        if number < len(groups):
            groups[number][key] = value.item()
        return
    parameter = parameters[owner]
    if is_number:
        optimizer.state[parameter][key] = value.item()
        return
    # Such a step count is on the parameters' device.
    on_device = any(optimizer.defaults.get(word) for word in ("capturable", "fused"))
    if key == "step" and on_device:
        value = value.to(parameter.device)
    # A fused kernel accepts no float64 step count.
    fused = is_torchs_own(optimizer) and any(group.get("fused") for group in optimizer.param_groups)
    if key == "step" and value.dtype == torch.float64 and fused:
        value = value.float()
    optimizer.state[parameter][key] = value.clone()


_FLAGS = ("fused", "foreach")  # flags that select torch's implementation of a step
_CHOICES = (None, False, True)


def implementation_flags(optimizer: torch.optim.Optimizer) -> int:
    """Return the implementation of torch that takes the steps: the flags of the first group, two
    bits each (0: no such flag). Implementations compute the same algorithm, but round differently.
    """
    groups = getattr(innermost_optimizer(optimizer), "param_groups", ())
    group = groups[0] if groups else {}
    bits = 0
    for place, flag in enumerate(_FLAGS):
        if flag in group and group[flag] in _CHOICES:
            bits |= (1 + _CHOICES.index(group[flag])) << (2 * place)
    return bits


def set_implementation(optimizer: torch.optim.Optimizer, wanted: int) -> None:
    """Make one of torch's optimizers use the given `implementation`."""
    optimizer = innermost_optimizer(optimizer)
    if not is_torchs_own(optimizer):
        return
    for group in optimizer.param_groups:
        for place, flag in enumerate(_FLAGS):
            choice = (wanted >> (2 * place)) & 3
            if choice and flag in group:
                group[flag] = _CHOICES[choice - 1]
