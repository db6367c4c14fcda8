"""Inputs and outputs of a job's modules in one step of one rank.

Next to the record, `sums/modules` holds 64 projections (`sketches`) of each tensor here and of its
gradient, or NaN without a gradient. Its shape is (tensors, 2, 64).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec
import torch

from distcheck.recordings.jobs.sketches import SLOTS
from distcheck.records.decoding import decode_json

SUMS = "sums/modules"
OF_RANKS = "watched/"
MOST_CALLS = 4096  # module calls in one step
MOST_TENSORS = 16  # inputs, and outputs, of one call
Shape = tuple[int, ...]
Place = Annotated[int, msgspec.Meta(ge=0)]


class WatchedTensor(msgspec.Struct, frozen=True):
    """An input or output of a module; shape None: unknown; `trains`: backward may use it."""

    shape: Shape | None
    digest: str
    trains: bool = False
    gradient: str = ""  # its digest, if there was one


class ModuleCall(msgspec.Struct, frozen=True):
    """The `call`-th call of a module in forward pass `number`, with indices of tensors."""

    name: str
    kind: str
    number: Place
    call: Place
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """Return the identity of the call across runs."""
        return self.name, self.number, self.call


class WatchedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """All modules of a step. Calls are in order of completion, so a module comes after its
    submodules.

    backward  tensors, in the order in which backward computed their gradients
    left_out  number of calls beyond the limit, which are omitted
    compiled  modules whose submodules are not recorded
    """

    calls: tuple[ModuleCall, ...] = ()
    tensors: tuple[WatchedTensor, ...] = ()
    backward: tuple[Place, ...] = ()
    left_out: Place = 0
    compiled: tuple[str, ...] = ()

    def fits(self, sums: torch.Tensor) -> bool:
        """Return True if every index is valid, and `sums` has a row for every tensor."""
        places = [one for call in self.calls for one in (*call.inputs, *call.outputs)]
        inside = all(place < len(self.tensors) for place in (*places, *self.backward))
        shape = (len(self.tensors), 2, SLOTS)
        return inside and (sums.shape, sums.dtype) == (shape, torch.float64)


class WatchedStep(NamedTuple):
    """Recorded modules, with their projections."""

    watched: WatchedCalls
    sums: torch.Tensor

    def places(self) -> dict[str, int]:
        """Return tensors' indices by role in the first such call: `2/layers.0#0/out 0`."""
        named: dict[int, str] = {}
        for call in self.watched.calls:
            for name, place in tensors_by_role(call):
                named.setdefault(place, name)
        return {name: place for place, name in named.items()}


def tensors_by_role(call: ModuleCall) -> Iterator[tuple[str, int]]:
    """Yield the tensors of a call by their role, outputs first."""
    of = f"{call.number}/{call.name}#{call.call}"
    for kind, places in (("out", call.outputs), ("in", call.inputs)):
        for number, place in enumerate(places):
            yield f"{of}/{kind} {number}", place


def shapes_by_role(watched: WatchedCalls) -> dict[str, Shape | None]:
    return {
        name: watched.tensors[place].shape
        for call in watched.calls
        for name, place in tensors_by_role(call)
    }


def prefix_of_rank(rank: int) -> str:
    """Return the prefix of a rank's recorded modules in a reference."""
    return f"{OF_RANKS}{rank}/"


def pack_modules(seen: WatchedStep, of: str) -> dict[str, torch.Tensor]:
    """Return recorded modules as named tensors for a file; names begin with `of`."""
    text = bytearray(msgspec.json.encode(seen.watched))
    return {f"{of}record": torch.frombuffer(text, dtype=torch.uint8), f"{of}sums": seen.sums}


def unpack_modules(found: Mapping[str, torch.Tensor], of: str) -> WatchedStep | None:
    """Read modules that `pack_modules` stored, None if absent. Raises ValueError."""
    if f"{of}record" not in found:
        return None
    watched = decode_json(bytes(found[f"{of}record"].tolist()), WatchedCalls)
    seen = WatchedStep(watched, found.get(f"{of}sums", torch.empty(0)))
    if not watched.fits(seen.sums):
        raise ValueError("modules have other tensors than their sums")
    return seen
