"""Arrangement of a model-parallel world's ranks: axes, sizes, and the samples that each rank reads.
Does not import torch.

Ranks are numbered like torch's `init_device_mesh`: the last axis varies fastest. Ranks that differ
only in axes other than `data` have the same data coordinate: they receive the same samples, and
compute one shard together.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, TypeVar, get_args

import msgspec

from distcheck.records.odd_ranks import grouped

Axis = Literal["data", "tensor", "pipeline", "sequence", "expert"]
Axes = tuple[tuple[Axis, int], ...]
REST = -1  # the size of an axis that uses the rest of the world
# Axes along which parameters are sharded.
DIVIDING = ("tensor", "pipeline", "expert")
MESH = "mesh "  # starts the note on a case in a mesh
T = TypeVar("T")


class Mesh(msgspec.Struct, frozen=True):
    """The axes of a world with their sizes; their product is the world size."""

    axes: Axes

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes)

    @property
    def world(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 if the mesh has no such axis."""
        return dict[str, int](self.axes).get(axis, 1)

    @property
    def data(self) -> int:
        """The number of shards of each step's batch."""
        return self.size("data")

    @property
    def divides(self) -> bool:
        """Return True if ranks with the same data coordinate shard the parameters."""
        return any(self.size(axis) > 1 for axis in DIVIDING)

    def coordinate(self, rank: int, axis: str) -> int:
        """Return a rank's index on an axis; 0 if the mesh has no such axis."""
        names = [name for name, _ in self.axes]
        if axis not in names:
            return 0
        inner = prod(size for _, size in self.axes[names.index(axis) + 1 :])  # type: ignore[arg-type]
        return rank // inner % self.size(axis)

    def ranks_of(self, data: int) -> tuple[int, ...]:
        """Return the ranks with a data coordinate; they share its samples."""
        return tuple(r for r in range(self.world) if self.coordinate(r, "data") == data)

    @property
    def readers(self) -> tuple[int, ...]:
        """Return the first rank of each data coordinate."""
        return tuple(self.ranks_of(data)[0] for data in range(self.data))

    def along(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ only in this axis."""
        return self.groups_at([name for name, _ in self.axes if name != axis])

    def groups_at(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the groups of ranks with the same coordinates on these axes."""
        places = grouped(
            range(self.world), lambda rank: tuple(self.coordinate(rank, axis) for axis in axes)
        )
        return list(map(tuple, places.values()))

    def spread(self, shards: Sequence[T]) -> list[T]:
        """Expand one value per data coordinate to one per rank."""
        return [shards[self.coordinate(rank, "data")] for rank in range(self.world)]


def promised_axes(parallel: Mapping[Any, Any] | None) -> Axes:
    """Return the axes that a promise declares. Raises ValueError for an invalid declaration."""
    if parallel is None:
        return ()
    known = get_args(Axis)
    if not isinstance(parallel, Mapping) or not parallel:
        raise ValueError(f"parallel is {parallel!r}; expected a dict such as {{'tensor': 2}}")
    for name, size in parallel.items():
        if name not in known:
            raise ValueError(
                f"parallel has the unknown axis {name!r}; known axes are {', '.join(known)}"
            )
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != REST):
            raise ValueError(
                f"parallel has {name} {size!r}; a size is a number from 1, or -1 for the rest of "
                "the world size"
            )
    if sum(size == REST for size in parallel.values()) > 1:
        raise ValueError("parallel has -1 for several axes; only one axis can take the rest")
    return tuple((name, int(size)) for name, size in parallel.items())


def promised_mesh(axes: Axes, world: int) -> Mesh | None:
    """Return the mesh of a promise in a world, or None without a promise. Raises ValueError if the
    product of its sizes is not the world size.
    """
    if not axes:
        return None
    if promised_axes(dict(axes)) != axes:
        raise ValueError("an axis of the mesh is named twice")
    given = prod(size for _, size in axes if size != REST)
    open_ended = any(size == REST for _, size in axes)
    found = Mesh(tuple((name, world // given if size == REST else size) for name, size in axes))
    if found.world != world or world < given:
        said = " x ".join(f"{name} {'-1' if size == REST else size}" for name, size in axes)
        needs = f"a multiple of {given} ranks" if open_ended else f"{given} ranks"
        raise ValueError(f"the mesh {said} needs {needs}, and the world has {world}")
    return found


def parse_mesh(text: str, world: int) -> Mesh:
    """Parse `data=2,tensor=2` as a mesh of a world. Raises ValueError for other text."""
    given = dict[str, int]()
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        if not size.lstrip("-").isdecimal():
            raise ValueError(
                f"the mesh {text!r} is malformed; expected for example data=2,tensor=2"
            )
        if name in given:
            raise ValueError("an axis of the mesh is named twice")
        given[name] = int(size)
    found = promised_mesh(promised_axes(given), world)
    assert found is not None
    return found
