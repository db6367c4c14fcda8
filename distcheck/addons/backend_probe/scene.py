"""One rank's buffers before a call and their expected contents after it, in plain Python.

A buffer is a matrix of `rows` x `cols` numbers in row-major order. A form of the tensor
(contiguous, strided, ...) places them in memory among elements that must stay unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distcheck.addons.backend_probe import patterns
from distcheck.addons.backend_probe.patterns import Value

FORMS = ("plain", "async", "strided", "transposed", "mixed", "empty", "one", "large", "sub-group")
GUARD = 64  # elements before and after; whole cache lines, to preserve alignment
_SHIFT = 5  # parts begin at different positions of every pattern, for each world size
_PERIOD = 97  # a long vector repeats after a prime number of elements, which no chunk has


class WrongAnswerError(Exception):
    """Raised if an operation completed with a wrong result, which the message describes."""


@dataclass(frozen=True, kw_only=True)
class ProbeScene:
    """One call as one rank sees it: `rank` and `root` are group ranks, of `world` ranks."""

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
        return self.rows * self.cols

    def part(self, rank: int, part: int = 0, *, rows: int | None = None) -> list[Value]:
        count = self.count if rows is None else rows * self.cols
        source = (
            patterns.product_contribution
            if self.reduction == "PRODUCT"
            else patterns.contribution_of_rank
        )
        begin = part * (min(self.count, _PERIOD) + _SHIFT)
        short = [
            source(self.dtype, rank=rank, position=begin + i, salt=self.salt, world=self.world)
            for i in range(min(count, _PERIOD))
        ]
        return (short * -(-count // _PERIOD))[:count] if short else []

    def reduced(self, part: int = 0) -> list[Value]:
        vectors = [self.part(rank, part)[:_PERIOD] for rank in range(self.world)]
        columns = zip(*vectors, strict=True)
        short = [patterns.reduce_values(self.reduction, column) for column in columns]
        return (short * -(-self.count // _PERIOD))[: self.count] if short else []


@dataclass(frozen=True)
class Buffer:
    """One tensor: its contents before the call (None: different everywhere from those after it),
    and after.

    `after` is None if the operation leaves the contents undefined; the surroundings are still
    checked.
    """

    rows: int
    before: list[Value] | None
    after: list[Value] | None


Buffers = dict[str, list[Buffer]]


@dataclass(frozen=True, kw_only=True)
class ProbedCall:
    """Context of a call: the group and its ranks' global numbers, and its parameters. `store` does
    not use the backend, and `turn` is a unique key prefix of this call in it.
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
        """`group` and `async_op`, for a collective."""
        return {"group": self.group, "async_op": self.asynchronous}

    @property
    def root(self) -> int:
        return self.members[self.scene.root]

    @property
    def is_root(self) -> bool:
        return self.scene.rank == self.scene.root


# Returns the work to wait for, if the call may return before it is complete.
Perform = Callable[[Any, dict[str, list[Any]], ProbedCall], Any]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a backend: its buffers, and its call in `torch.distributed`.

    A rooted one is called with every rank as the root in turn. A dtype of "" means none. `witness`
    checks effects outside buffers after the call; it raises WrongAnswerError.
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
    """Layout of a buffer in its storage of `size` elements."""

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


def buffer_layout(form: str, rows: int, cols: int) -> Layout:
    """Return the layout of a form: `strided` has gaps in both directions, `transposed` has none."""
    if form == "strided":
        width = 2 * cols + 1
        return Layout((rows + 2) * width + GUARD, width + 1, (rows, cols), (width, 2))
    strides = (1, rows) if form == "transposed" else (cols, 1)
    return Layout(rows * cols + 2 * GUARD, GUARD, (rows, cols), strides)


def unchangeable_values(dtype: str, size: int) -> list[Value]:
    """Return a storage [size] of values that no call may change."""
    if dtype == "bool":
        return [index % 2 == 0 for index in range(size)]
    return [patterns.AROUND] * size


def initial_output_values(expected: Sequence[Value], dtype: str) -> list[Value]:
    """Return the contents of an output before the call: different from `expected` everywhere."""
    if dtype == "bool":
        return [not value for value in expected]
    return [patterns.UNTOUCHED] * len(expected)
