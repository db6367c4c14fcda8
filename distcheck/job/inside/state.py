"""Recorded state put into a model, a little beside it for a perturbation; means of gradients; state
that scripts hold beside models and optimizers.
"""

import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from distcheck.job.inside import tensors
from distcheck.job.inside.grad_accumulation import GradAccumulation
from distcheck.job.inside.parameters import Parameters
from distcheck.job.inside.rank import averaged, state_digest
from distcheck.job.inside.step_file import StepFile
from distcheck.machine.compat import fsdp2_dtypes
from distcheck.machine.numerics import spacing
from distcheck.recordings.jobs import records

Tensors = dict[str, torch.Tensor]
# What a copy writes beside its gradients.
NOT_GRADIENTS = ("loss", "passes", "backwards", "count", "sums", "own", "kind", "weights")


def load(
    into: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor], kind: str,
    moves: torch.Generator | None = None,
) -> None:  # fmt: skip
    """Puts recorded tensors of a kind in, moved by one ULP if asked to."""
    with torch.no_grad():
        for name, tensor in into.items():
            value = kept.get(f"{kind}{name}")
            if value is not None and not torch.nn.parameter.is_lazy(tensor):
                value = value if moves is None else perturbed(value, moves)
                local(tensor).data.copy_(value)  # graphs that have the tensor may still be used


def gradients(parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """The gradients that there are, as copies on the CPU."""
    return {
        name: tensors.whole(parameter.grad).clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def put(parameters: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor | None]) -> None:
    """Makes these the gradients, None for a parameter that is to have none."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            number = given.get(name)
            if number is None:
                parameter.grad = None
            elif parameter.grad is not None:
                local(parameter.grad).copy_(number)
            elif not tensors.is_in_parts(parameter):
                parameter.grad = number.to(parameter.device, parameter.dtype).clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What one rank holds of a tensor that is divided among ranks: of one rank, all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def perturbed(
    tensor: torch.Tensor, generator: torch.Generator, of: torch.dtype | None = None
) -> torch.Tensor:
    """Every element one ULP up or down, by chance; one of another dtype if it is coarser."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.bool)
    if of is None or spacing(of) <= spacing(tensor.dtype):
        end = torch.where(up, float("inf"), float("-inf")).to(tensor.dtype)
        return torch.nextafter(tensor, end)
    ulp = torch.ldexp(tensor.new_full((), spacing(of)), torch.frexp(tensor).exponent - 1)
    return torch.where(up, tensor + ulp, tensor - ulp)


def mean(parts: Sequence[Tensors | None], weights: Sequence[float]) -> Tensors | None:
    """The weighted mean of what copies wrote, in the dtype of each; None where one is missing."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    found: Tensors = {}
    for name in dict.fromkeys(chain(*there)):
        pairs = zip(there, weights, strict=True)
        held = [(part[name], weight) for part, weight in pairs if name in part]
        terms = [one.double() * weight for one, weight in held]
        found[name] = sum(terms[1:], terms[0]).to(held[-1][0].dtype)
    return found


def distance(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], factor: float = 1.0
) -> float:
    """How far gradients are from others times a factor, over the norm of those, in the L2 norm."""
    names = [name for name in other if name in one and name not in NOT_GRADIENTS]
    size = sum(float(other[name].double().square().sum()) for name in names) * factor**2
    apart = (one[n].double() - factor * other[n].double() for n in names)
    left = sum(float(part.square().sum()) for part in apart)
    return float((left / size) ** 0.5) if size else 0.0


def spread_of(
    gradient: torch.Tensor, perturbed: Sequence[torch.Tensor], name: str, known: dict[str, float]
) -> float:
    """The distance of a gradient from the farthest of those that parameters moved by one ULP give.
    Its share of the norm is kept in `known`, by which it is estimated if no parameter was moved.
    """
    norm = float(gradient.double().norm())
    if not perturbed:
        return known.get(name, math.nan) * norm
    most = max(float((one - gradient).double().norm()) for one in perturbed)
    if norm:
        known[name] = most / norm
    return most


def factor_of(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The factor between one set of gradients and another, by least squares; 0 if there is none."""
    names = [name for name in other if name in one and name not in NOT_GRADIENTS]
    square = sum(float(other[name].double().square().sum()) for name in names)
    product = sum(float((one[n].double() * other[n].double()).sum()) for n in names)
    return product / square if square else 0.0


SMALL = 64  # elements; what an optimizer holds of a parameter is kept whole up to here


class ExtraState:
    """What is held in one step, for its record; `notes`: all of it, or the dtype of autocast
    alone.
    """

    def __init__(self, parameters: Parameters, added: GradAccumulation, *, notes: bool) -> None:
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
