"""The buffers of a call on one rank, and their expected contents after the call, in plain Python.

A buffer is a matrix of `rows` x `cols` numbers in row-major order. The form of the tensor
(contiguous, strided, ...) determines where they lie in memory. The elements between and around them
must stay unchanged.
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
    """One call from the view of one rank. `rank` and `root` are group ranks; `world` is the size of
    the group.
    """

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
    """Contents of one tensor before and after the call.

    If `before` is None, the call does not use the old contents; the buffer is then filled with
    values that differ from `after` everywhere. `after` is None if the operation leaves the contents
    undefined; the elements around the buffer are checked in any case.
    """

    rows: int
    before: list[Value] | None
    after: list[Value] | None


Buffers = dict[str, list[Buffer]]


@dataclass(frozen=True, kw_only=True)
class ProbedCall:
    """Arguments of a call: the process group, the global ranks of its members, and the parameters
    of the operation. `store` does not use the probed backend. `turn` is a key prefix that is unique
    to this call.
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
        """Keyword arguments of a collective: `group` and `async_op`."""
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

    An operation with a root is called once with each rank as the root. A dtype of "" means that the
    operation has none. `witness` checks effects other than buffer contents after the call, and
    raises WrongAnswerError.
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
    """Positions of a buffer's elements in a storage of `size` elements."""

    size: int
    offset: int
    shape: tuple[int, int]
    strides: tuple[int, int]

    def place(self, values: Sequence[Any], around: list[Any]) -> list[Any]:
        """Return the contents of a storage: `values` at their positions, and `around` [size]
        everywhere else.
        """
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
    """Return the values [size] that fill a storage around the buffer. No call may change them."""
    if dtype == "bool":
        return [index % 2 == 0 for index in range(size)]
    return [patterns.AROUND] * size


def initial_output_values(expected: Sequence[Value], dtype: str) -> list[Value]:
    """Return the contents of an output before the call. They differ from `expected` everywhere."""
    if dtype == "bool":
        return [not value for value in expected]
    return [patterns.UNTOUCHED] * len(expected)
