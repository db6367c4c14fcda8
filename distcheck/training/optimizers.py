"""An optimizer's state by name: as it is recorded, and put back into one that is built anew.

Most of it is tensors, kept for each parameter. Some optimizers keep Python numbers as well: a count
of steps for each parameter, or what they count and learn in their groups (`k` of schedule-free
ones, a warm-up within the optimizer). Those are taken as tensors without dimensions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_GROUP = "param_groups["


def is_of_group(name: str) -> bool:
    """Whether a name is that of a group's number, and not of something kept for a parameter."""
    return name.startswith(_GROUP)


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch defines it: what those keep is known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def tensors_and_numbers(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the optimizer keeps for parameters, as `<parameter>/<state key>`, in a fixed order: its
    tensors and its numbers.
    """
    optimizer = innermost(optimizer)
    tensors, numbers = {}, {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key, value in sorted(state.items(), key=_by_key):
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = _count(value) if key == "step" else value
            elif (number := _as_tensor(value)) is not None:
                numbers[f"{name}/{key}"] = number
    return tensors, numbers


def _count(steps: torch.Tensor) -> torch.Tensor:
    """A count of steps in the dtype that torch's plain implementations have for it: with a default
    dtype of float64 that is float64, and float32 in the fused ones.
    """
    fused = steps.dtype == torch.float32 and torch.get_default_dtype() == torch.float64
    return steps.double() if fused and steps.dim() == 0 else steps


def group_numbers(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every number of its groups, learning rates and the like included, as
    `param_groups[<n>]/<key>`.
    """
    numbers = {}
    groups = getattr(innermost(optimizer), "param_groups", ())  # people's own may have none
    for index, group in enumerate(groups):
        for key, value in sorted(group.items(), key=_by_key):
            if (number := _as_tensor(value)) is not None:
                numbers[f"{_GROUP}{index}]/{key}"] = number
    return numbers


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the state: of one around another (ZeroRedundancyOptimizer) the
    inner one.
    """
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


class OptimizerProxy:
    """What the loop sees in place of an optimizer: that one's groups and state, unless a class
    derived from this says otherwise.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def state(self) -> Any:
        return self._inner.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those whose rates the workload sets."""
        groups: list[dict[str, Any]] = self._inner.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's own does."""
        self._inner.zero_grad(set_to_none=set_to_none)


def _by_key(item: tuple[object, object]) -> str:
    return str(item[0])


def _as_tensor(value: object) -> torch.Tensor | None:
    """A Python number with all of its bits; None for anything else."""
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else None


def put_back(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    name: str,
    value: torch.Tensor,
    *,
    is_number: bool,
) -> None:
    """Gives an optimizer over `parameters` what is called `name` in another."""
    optimizer = innermost(optimizer)
    owner, _, key = name.rpartition("/")
    if is_of_group(name):
        groups = optimizer.param_groups
        number = int(owner.removeprefix(_GROUP).removesuffix("]"))
        if number < len(groups):
            groups[number][key] = value.item()
        return
    parameter = parameters[owner]
    if is_number:
        optimizer.state[parameter][key] = value.item()
        return
    if key == "step" and _counts_on_device(optimizer):
        value = value.to(parameter.device)
    if key == "step" and value.dtype == torch.float64 and _is_fused(optimizer):
        value = value.float()
    optimizer.state[parameter][key] = value.clone()


_FLAGS = ("fused", "foreach")  # which of torch's implementations of one algorithm takes a step
_CHOICES = (None, False, True)


def implementation(optimizer: torch.optim.Optimizer) -> int:
    """Which of torch's implementations takes the steps: the flags of the first group, in two bits
    each (0: it has no such flag). They compute one algorithm, and round differently.
    """
    groups = getattr(innermost(optimizer), "param_groups", ())
    group = groups[0] if groups else {}
    bits = 0
    for place, flag in enumerate(_FLAGS):
        if flag in group and group[flag] in _CHOICES:
            bits |= (1 + _CHOICES.index(group[flag])) << (2 * place)
    return bits


def implement(optimizer: torch.optim.Optimizer, wanted: int) -> None:
    """Makes one of torch's own optimizers step as `implementation` says of another."""
    optimizer = innermost(optimizer)
    if not is_torchs_own(optimizer):
        return
    for group in optimizer.param_groups:
        for place, flag in enumerate(_FLAGS):
            choice = (wanted >> (2 * place)) & 3
            if choice and flag in group:
                group[flag] = _CHOICES[choice - 1]


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused kernel takes the steps; it takes no count in float64."""
    return is_torchs_own(optimizer) and any(group.get("fused") for group in optimizer.param_groups)


def _counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps its count of steps beside the parameters, as fused ones on a GPU do."""
    return any(bool(optimizer.defaults.get(word)) for word in ("capturable", "fused"))
