"""What one rank holds before a call, and what it must hold after it; plain Python.

A buffer is a matrix of `rows` x `cols` numbers in row-major order, which a form lays out in memory
among elements that must stay untouched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distcheck.backend_probe import patterns
from distcheck.backend_probe.patterns import Value

FORMS = ("plain", "async", "strided", "transposed", "mixed", "empty", "one", "large", "sub-group")
GUARD = 64  # elements before and after; whole cache lines, so that alignment stays what it was
_SHIFT = 5  # parts begin at different places of every pattern, for each number of ranks
_PERIOD = 97  # a long vector repeats after a prime number of elements, which no chunk does


class WrongAnswerError(Exception):
    """An operation came back and what it did is wrong; says what."""


@dataclass(frozen=True, kw_only=True)
class ProbeScene:
    """One call as one rank sees it: `rank` and `root` count within the group of `world` ranks."""

    rank: int
    world: int
    dtype: str
    rows: int
    cols: int
    salt: int
    reduction: str = "SUM"
    root: int = 0

    @property
    def count(self) -> int:
        """Elements of one rank's part."""
        return self.rows * self.cols

    def part(self, rank: int, part: int = 0, *, rows: int | None = None) -> list[Value]:
        """Return the `part`-th vector that `rank` brings along."""
        count = self.count if rows is None else rows * self.cols
        source = patterns.factor if self.reduction == "PRODUCT" else patterns.value
        begin = part * (min(self.count, _PERIOD) + _SHIFT)
        short = [
            source(self.dtype, rank=rank, position=begin + i, salt=self.salt, world=self.world)
            for i in range(min(count, _PERIOD))
        ]
        return (short * -(-count // _PERIOD))[:count] if short else []

    def reduced(self, part: int = 0) -> list[Value]:
        """What the ranks' `part`-th vectors become together."""
        vectors = [self.part(rank, part)[:_PERIOD] for rank in range(self.world)]
        columns = zip(*vectors, strict=True)
        short = [patterns.reduce_values(self.reduction, column) for column in columns]
        return (short * -(-self.count // _PERIOD))[: self.count] if short else []


@dataclass(frozen=True)
class Buffer:
    """One tensor: what is in it before the call (None: anything else than after it), and after.

    `after` is None where the operation leaves the content undefined; its surroundings still count.
    """

    rows: int
    before: list[Value] | None
    after: list[Value] | None


Buffers = dict[str, list[Buffer]]


@dataclass(frozen=True, kw_only=True)
class ProbedCall:
    """How to perform an operation: the group and its ranks' global numbers, and what is asked.

    `store` is one that the backend has no part in, and `turn` a name of this call's own in it.
    """

    group: Any
    members: tuple[int, ...]
    scene: ProbeScene
    op: Any
    asynchronous: bool
    store: Any
    turn: str

    @property
    def options(self) -> dict[str, Any]:
        """group and async_op, for a collective."""
        return {"group": self.group, "async_op": self.asynchronous}

    @property
    def root(self) -> int:
        return self.members[self.scene.root]

    @property
    def is_root(self) -> bool:
        return self.scene.rank == self.scene.root


# The work to wait for, if the call returned before it was done.
Perform = Callable[[Any, dict[str, list[Any]], ProbedCall], Any]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a backend: its buffers, and its call on `torch.distributed`.

    A rooted one is called with every rank as the root in turn. A dtype of "" stands for none.
    `witness` looks for what no buffer shows, when the call is over; it raises WrongAnswerError.
    """

    name: str
    buffers: Callable[[ProbeScene], Buffers]
    perform: Perform
    witness: Callable[[ProbedCall], None] = lambda call: None
    reduces: bool = False
    rooted: bool = False
    forms: tuple[str, ...] = FORMS
    dtypes: tuple[str, ...] = tuple(patterns.DTYPES)


@dataclass(frozen=True)
class Layout:
    """Where a buffer's numbers lie in its storage of `size` elements."""

    size: int
    offset: int
    shape: tuple[int, int]
    strides: tuple[int, int]

    def place(self, values: Sequence[Any], around: list[Any]) -> list[Any]:
        """Return a whole storage: `values` in their places, `around` [size] everywhere else."""
        rows, cols = self.shape
        down, right = self.strides
        for row in range(rows if cols else 0):
            begin = self.offset + row * down
            around[begin : begin + (cols - 1) * right + 1 : right] = values[
                row * cols : (row + 1) * cols
            ]
        return around


def lay_out(form: str, rows: int, cols: int) -> Layout:
    """Return the layout of a form: `strided` has gaps in both directions, `transposed` has none."""
    if form == "strided":
        width = 2 * cols + 1
        return Layout((rows + 2) * width + GUARD, width + 1, (rows, cols), (width, 2))
    strides = (1, rows) if form == "transposed" else (cols, 1)
    return Layout(rows * cols + 2 * GUARD, GUARD, (rows, cols), strides)


def surroundings(dtype: str, size: int) -> list[Value]:
    """Return a storage [size] of numbers that no call may change."""
    if dtype == "bool":
        return [index % 2 == 0 for index in range(size)]
    return [patterns.AROUND] * size


def untouched(expected: Sequence[Value], dtype: str) -> list[Value]:
    """What is in an output before the call: nowhere what must be there afterwards."""
    if dtype == "bool":
        return [not value for value in expected]
    return [patterns.UNTOUCHED] * len(expected)
