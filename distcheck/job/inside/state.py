"""Loads recorded state into a model, perturbed if requested; computes means and distances of
gradients; records state held outside models and optimizers.
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
from distcheck.job.inside.rank import models_like_averages, state_digest
from distcheck.job.inside.step_file import StepFile
from distcheck.machine.compat import fsdp2_dtypes
from distcheck.machine.numerics import perturbed, spacing
from distcheck.recordings.jobs import records

Tensors = dict[str, torch.Tensor]
# Results of a copy in addition to gradients.
NOT_GRADIENTS = (
    "loss", "passes", "backwards", "count", "sums", "own", "kind",
    "weights", "classes", "exchanges", "term-sources",
)  # fmt: skip


def load_recorded_tensors(
    into: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor], kind: str,
    moves: torch.Generator | None = None,
) -> None:  # fmt: skip
    """Load recorded tensors of a kind, perturbed by one ULP if `moves` is given."""
    with torch.no_grad():
        for name, tensor in into.items():
            value = kept.get(f"{kind}{name}")
            if value is not None and not torch.nn.parameter.is_lazy(tensor):
                value = value if moves is None else perturbed(value, moves)
                tensors.local(tensor).data.copy_(value)  # graphs that use the tensor remain valid


def gradients(parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """Return copies of existing gradients on the CPU."""
    return {
        name: tensors.unsharded_on_cpu(parameter.grad).clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def put(parameters: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor | None]) -> None:
    """Set gradients; None clears the gradient of a parameter."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            number = given.get(name)
            if number is None:
                parameter.grad = None
            elif parameter.grad is not None:
                tensors.local(parameter.grad).copy_(number)
            elif not tensors.is_dtensor(parameter):
                parameter.grad = number.to(parameter.device, parameter.dtype).clone()


def mean(parts: Sequence[Tensors | None], weights: Sequence[float]) -> Tensors | None:
    """Return the weighted mean of the copies' results, each in its own dtype; None if a result is
    missing.
    """
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
    """Return the L2 distance between gradients and `factor` times other gradients, relative to the
    norm of the latter.
    """
    names = [name for name in other if name in one and name not in NOT_GRADIENTS]
    size = sum(float(other[name].double().square().sum()) for name in names) * factor**2
    apart = (one[n].double() - factor * other[n].double() for n in names)
    left = sum(float(part.square().sum()) for part in apart)
    return float((left / size) ** 0.5) if size else 0.0


def distance_from_farthest(
    gradient: torch.Tensor, perturbed: Sequence[torch.Tensor], name: str, known: dict[str, float]
) -> float:
    """Return the largest distance between a gradient and its perturbed versions.

    The distance relative to the gradient's norm is kept in `known`. It serves as the estimate if
    there are no perturbed gradients.
    """
    norm = float(gradient.double().norm())
    if not perturbed:
        return known.get(name, math.nan) * norm
    most = max(float((one - gradient).double().norm()) for one in perturbed)
    if norm:
        known[name] = most / norm
    return most


def factor_of(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the least-squares factor between two sets of gradients, or 0."""
    names = [name for name in other if name in one and name not in NOT_GRADIENTS]
    square = sum(float(other[name].double().square().sum()) for name in names)
    product = sum(float((one[n].double() * other[n].double()).sum()) for n in names)
    return product / square if square else 0.0


SMALL = 64  # elements; optimizer state up to this size is recorded completely


class ExtraState:
    """Collects state of one step that is held outside models and optimizers. Without `notes`, only
    autocast's dtype.
    """

    def __init__(self, parameters: Parameters, added: GradAccumulation, *, notes: bool) -> None:
        self._parameters, self._added, self._notes = parameters, added, notes
        self.about: dict[str, Any] = {}

    def autocasts(self) -> None:
        """Record the dtype of forward passes if autocast is on."""
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                self.about["computed"] = str(dtype).removeprefix("torch.")

    def begin(self) -> None:
        """Record averages of the model and FSDP2's dtype before the first forward pass."""
        parts = [part for root in self._parameters.roots for part in root.modules()]
        dtypes = [one for one, _ in map(fsdp2_dtypes, parts) if one is not None]
        if dtypes:
            coarsest = max(dtypes, key=spacing)
            self.about["computed"] = str(coarsest).removeprefix("torch.")
        if self._notes:
            own = [id(one) for one in vars(self._added).values()]
            self.about["held"] = untrained_copies(self._parameters, own)

    def note_optimizer(self, optimizer: torch.optim.Optimizer, file: StepFile) -> None:
        """Record an optimizer's state at the start of its step."""
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
    """Yield an optimizer's state of each parameter, by `<parameter>/<key>`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = parameters.name_of(parameter)
            state = optimizer.state.get(parameter) if name is not None else None
            for key, value in sorted((state or {}).items(), key=lambda item: str(item[0])):
                if isinstance(value, torch.Tensor | int | float):
                    yield f"{name}/{key}", value


def untrained_copies(parameters: Parameters, own: Collection[int]) -> tuple[str, ...]:
    """Return digests of untrained copies of the model: modules, and dictionaries with a tensor for
    each parameter. distcheck's `own` objects (by id) are excluded.
    """
    if parameters.has_parts:  # averages are sharded as well
        return ()
    names = set(parameters.by_name)
    modules = models_like_averages(parameters)
    known = [*parameters.by_name.values(), *(one for m in modules for one in m.parameters())]
    storages = {one.untyped_storage().data_ptr() for one in known}
    found = [state_digest(one) for one in modules]
    for one in gc.get_objects():
        if issubclass(type(one), dict) and len(one) >= len(names) and id(one) not in own:
            held = _average_in(one, names, storages)
            found += [held] if held else []
    return tuple(found)


def _average_in(one: dict[Any, Any], names: set[str], storages: set[int]) -> str:
    """Return the digest of a dictionary of tensors; "" for other dictionaries and for the model's
    own tensors.
    """
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
    return records.digest(
        "".join(tensors.digest_of(tensors.unsharded_on_cpu(t)) for t in held).encode()
    )
