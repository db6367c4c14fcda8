"""The state of one rank after a step, as digests: parameters, buffers, optimizer state,
settings.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from distcheck.job.guard.digests import combined, digests
from distcheck.job.guard.watched import (
    WatchedModel,
    is_in_one_piece,
    is_library_sharded,
    local_shard_and_place,
)
from distcheck.job.inside.parameters import places_in
from distcheck.job.inside.rank import numeric_settings

# A rank sends these in every check, one number each.
FIELDS = (
    "failed", "step", "names", "parameters", "part", "divided", "buffers", "statistics",
    "state_names", "state", "settings", "initial", "cpu_random", "device_random",
)  # fmt: skip


@dataclass
class ReplicaState:
    """Digests of one rank by kind and name, and the number of tensors that cannot be compared."""

    parameters: dict[str, int] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    divided: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    statistics: dict[str, int] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    part: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    left_out: int = 0  # tensors sharded in a library's own format, or in no model
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        """The number of tensors that are compared across ranks."""
        return len(self.parameters) + len(self.state) + len(self.divided) + len(self.buffers)


def take(optimizer: torch.optim.Optimizer, watched: WatchedModel | None) -> ReplicaState:
    """Return the state of this rank. `watched` is None if no model was called in training."""
    found = ReplicaState()
    named = list(watched.parameters()) if watched is not None else []
    is_whole = watched is None or is_in_one_piece(watched.model)
    known = {id(p) for _, p in named}
    named += [(n, p) for n, p in places_in(optimizer) if id(p) not in known]
    names = {id(p): name for name, p in named} if is_whole else {}
    if is_whole:
        _add_digests(found, "parameters", named)
    of_state = [
        (f"{key} of {names[id(p)]}", value)
        for _, p in places_in(optimizer)
        if id(p) in names
        for key, value in sorted(optimizer.state.get(p, {}).items(), key=lambda item: str(item[0]))
    ]
    _add_digests(found, "state", [(n, v) for n, v in of_state if isinstance(v, torch.Tensor)])
    found.left_out += sum(id(p) not in names for _, p in places_in(optimizer))
    for number, group in enumerate(optimizer.param_groups):
        found.settings |= {f"{k} of group {number}": v for k, v in numeric_settings(group).items()}
    found.settings |= {n: float(v) for n, v in of_state if isinstance(v, bool | int | float)}
    if watched is not None and watched.buffers:
        own = watched.statistics()
        found.statistics = {n: d for n, d in watched.buffers.items() if n in own}
        found.buffers = {n: d for n, d in watched.buffers.items() if n not in own}
    return found


def initial(optimizer: torch.optim.Optimizer) -> int:
    """Return one digest of an optimizer's parameters before its first step."""
    held = [
        p
        for _, p in places_in(optimizer)
        if not is_library_sharded(p) and local_shard_and_place(p)[0] is p
    ]
    return combined(digests(held))


def _add_digests(found: ReplicaState, kind: str, named: list[tuple[str, torch.Tensor]]) -> None:
    """Add digests of tensors under their kind; sharded ones under `divided`."""
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        own, at = (None, "") if is_library_sharded(tensor) else local_shard_and_place(tensor)
        if own is None or own.device.type == "meta":
            found.left_out += 1
        elif at:
            parts[name] = own
            found.part = (*found.part, f"{name}@{at}")
        else:
            whole[name] = own
            found.shapes = (*found.shapes, f"{kind} {name} {own.dtype} {tuple(own.shape)}")
    found.tensors |= whole | parts
    together = {**whole, **parts}
    of_all = dict(zip(together, digests(list(together.values())), strict=True))
    getattr(found, kind).update({name: of_all[name] for name in whole})
    found.divided.update({name: of_all[name] for name in parts})


def numbers(
    state: ReplicaState, *, step: int, watched: WatchedModel | None, randomness: bool,
    initial: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Return this rank's numbers for a check, by the names of `FIELDS`."""
    of_state = [shape for shape in state.shapes if shape.startswith("state ")]
    drawn = watched.drawn if watched is not None and randomness else [0, 0]

    def of(kind: dict[str, Any]) -> int:
        return combined([part for item in kind.items() for part in item])

    return {
        "failed": 0,
        "step": step,
        "names": combined([shape for shape in state.shapes if not shape.startswith("state ")]),
        "parameters": of(state.parameters),
        "part": combined(state.part),
        "divided": of(state.divided),
        "buffers": of(state.buffers),
        "statistics": of(state.statistics),
        "state_names": combined(of_state),
        "state": of(state.state),
        "settings": of(state.settings),
        "initial": (watched.initial or 0 if watched is not None else 0)
        if initial is None
        else initial,
        "cpu_random": drawn[0],
        "device_random": drawn[1],
    }
