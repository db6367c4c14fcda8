"""What a script holds beside its model: the optimizer's state, and averages of the model."""

import gc
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch

from distcheck.job.inside import tensors
from distcheck.job.inside.contributions import Contributions
from distcheck.job.inside.parameters import Parameters
from distcheck.job.inside.rank import averaged, state_digest
from distcheck.job.inside.step_file import StepFile
from distcheck.machine.compat import fsdp2_dtypes
from distcheck.machine.numerics import spacing
from distcheck.recordings.jobs import records

SMALL = 64  # elements; what an optimizer holds of a parameter is kept whole up to here


class HeldState:
    """What is held in one step, for its record; `notes`: all of it, or the dtype of autocast
    alone.
    """

    def __init__(self, parameters: Parameters, added: Contributions, *, notes: bool) -> None:
        self._parameters, self._added, self._notes = parameters, added, notes
        self.about: dict[str, Any] = {}

    def autocasts(self) -> None:
        """Notes the dtype that forward passes compute in, if autocast is on."""
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                self.about["computed"] = str(dtype).removeprefix("torch.")

    def begin(self) -> None:
        """Notes averages of the model, and FSDP2's dtype, before the first forward pass."""
        parts = [part for root in self._parameters.roots for part in root.modules()]
        dtypes = [one for one, _ in map(fsdp2_dtypes, parts) if one is not None]
        if dtypes:
            coarsest = max(dtypes, key=spacing)
            self.about["computed"] = str(coarsest).removeprefix("torch.")
        if self._notes:
            own = (self._added.local, self._added.sizes, self._added.norms)
            self.about["held"] = averages_held(self._parameters, [id(one) for one in own])

    def note_optimizer(self, optimizer: torch.optim.Optimizer, file: StepFile) -> None:
        """Notes what an optimizer holds when it begins to step."""
        if not self._notes:
            return
        counters: dict[str, float] = {}
        for name, value in optimizer_state(optimizer, self._parameters):
            one = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            file.add_held(f"optim/{name}", one, keep=one.numel() <= SMALL)
            if one.numel() == 1:
                counters.setdefault(name.rpartition("/")[2], float(one))
        self.about["counters"] = {k: v for k, v in counters.items() if math.isfinite(v)}


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Parameters
) -> Iterator[tuple[str, Any]]:
    """What an optimizer holds of each of its parameters, by `<parameter>/<key>`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = parameters.name_of(parameter)
            state = optimizer.state.get(parameter) if name is not None else None
            for key, value in sorted((state or {}).items(), key=lambda item: str(item[0])):
                if isinstance(value, torch.Tensor | int | float):
                    yield f"{name}/{key}", value


def averages_held(parameters: Parameters, own: Collection[int]) -> tuple[str, ...]:
    """Digests of what looks like the model and does not train: modules, and dictionaries with a
    tensor for each of its parameters; not of distcheck's `own`, by their ids.
    """
    if parameters.has_parts:  # ranks have parts of them as well, which are not put together
        return ()
    names = set(parameters.by_name)
    modules = averaged(parameters)
    known = [*parameters.by_name.values(), *(one for m in modules for one in m.parameters())]
    storages = {one.untyped_storage().data_ptr() for one in known}
    found = [state_digest(one) for one in modules]
    for one in gc.get_objects():
        if issubclass(type(one), dict) and len(one) >= len(names) and id(one) not in own:
            held = _average_in(one, names, storages)
            found += [held] if held else []
    return tuple(found)


def _average_in(one: dict[Any, Any], names: set[str], storages: set[int]) -> str:
    """The digest of a dictionary of tensors; empty for one that is none, or is the model's own."""
    if not all(isinstance(key, str) for key in one):
        return ""
    named = {tensors.plain_name(key): value for key, value in list(one.items())}
    if not names <= set(named):
        return ""
    held = [named[name] for name in sorted(names)]
    if not all(type(value) is torch.Tensor and not value.requires_grad for value in held):
        return ""
    if any(value.untyped_storage().data_ptr() in storages for value in held):
        return ""
    return records.digest("".join(tensors.digest_of(tensors.whole(t)) for t in held).encode())
