"""What modules of a job were given, and what they returned, in one step of one rank.

Beside the record, `sums/modules` holds 64 sums (`sketches`) of each tensor here and of its
gradient, NaN where there is none: its shape is (tensors, 2, 64).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec
import torch

from distcheck.recordings.jobs.sketches import SLOTS
from distcheck.records.decoding import decode_json

SUMS = "sums/modules"
OF_RANKS = "watched/"
MOST_CALLS = 4096  # of modules, in one step
MOST_TENSORS = 16  # of one call: given, and returned
Shape = tuple[int, ...]
Place = Annotated[int, msgspec.Meta(ge=0)]


class WatchedTensor(msgspec.Struct, frozen=True):
    """A tensor that a module was given or has returned; `shape` is None where it is not known, and
    `trains` whether a backward pass may go through it.
    """

    shape: Shape | None
    digest: str
    trains: bool = False
    gradient: str = ""  # its digest, if one came


class ModuleCall(msgspec.Struct, frozen=True):
    """A call of a module, the `call`-th of it in forward pass `number` of the step; inputs and
    outputs are places among the tensors.
    """

    name: str
    kind: str
    number: Place
    call: Place
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """What the same call in another run has as well."""
        return self.name, self.number, self.call


class WatchedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """All of a step. Calls are in the order in which they were over, so a module comes after those
    within it; `backward` are the tensors in the order in which gradients came. `left_out` counts
    calls beyond the most that are kept; `compiled` are modules within which nothing is seen.
    """

    calls: tuple[ModuleCall, ...] = ()
    tensors: tuple[WatchedTensor, ...] = ()
    backward: tuple[Place, ...] = ()
    left_out: Place = 0
    compiled: tuple[str, ...] = ()

    def fits(self, sums: torch.Tensor) -> bool:
        """Whether every place is there, and `sums` has all of them."""
        places = [one for call in self.calls for one in (*call.inputs, *call.outputs)]
        inside = all(place < len(self.tensors) for place in (*places, *self.backward))
        shape = (len(self.tensors), 2, SLOTS)
        return inside and (sums.shape, sums.dtype) == (shape, torch.float64)


class WatchedStep(NamedTuple):
    """What was watched, with its sums."""

    watched: WatchedCalls
    sums: torch.Tensor

    def places(self) -> dict[str, int]:
        """Each tensor by what it is of the first call that has it: `2/layers.0#0/out 0`."""
        named: dict[int, str] = {}
        for call in self.watched.calls:
            for name, place in named_places(call):
                named.setdefault(place, name)
        return {name: place for place, name in named.items()}


def named_places(call: ModuleCall) -> Iterator[tuple[str, int]]:
    """The tensors of a call, by what they are of it: those that it has returned first."""
    of = f"{call.number}/{call.name}#{call.call}"
    for kind, places in (("out", call.outputs), ("in", call.inputs)):
        for number, place in enumerate(places):
            yield f"{of}/{kind} {number}", place


def shapes_of(watched: WatchedCalls) -> dict[str, Shape | None]:
    return {
        name: watched.tensors[place].shape
        for call in watched.calls
        for name, place in named_places(call)
    }


def of_rank(rank: int) -> str:
    """What the names begin with of what was seen of a rank, in a reference."""
    return f"{OF_RANKS}{rank}/"


def packed(seen: WatchedStep, of: str) -> dict[str, torch.Tensor]:
    """What was seen as tensors, for a file of these alone; their names begin with `of`."""
    text = bytearray(msgspec.json.encode(seen.watched))
    return {f"{of}record": torch.frombuffer(text, dtype=torch.uint8), f"{of}sums": seen.sums}


def unpacked(found: Mapping[str, torch.Tensor], of: str) -> WatchedStep | None:
    """The same again; None where there is none. Raises ValueError for what does not fit."""
    if f"{of}record" not in found:
        return None
    watched = decode_json(bytes(found[f"{of}record"].tolist()), WatchedCalls)
    seen = WatchedStep(watched, found.get(f"{of}sums", torch.empty(0)))
    if not watched.fits(seen.sums):
        raise ValueError("modules have other tensors than their sums")
    return seen
