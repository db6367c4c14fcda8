"""The source lines that each gradient of a step passed through, and their binary form in a trace.

They follow a step's header, in a space of fixed size: lines that do not fit are not written.
"""

import mmap
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from distcheck.recordings.traces.layout import TraceLayout

_LENGTH = 4  # bytes of the length prefix
_Number = Annotated[int, Meta(ge=0, le=255)]
_MOST_LINES = 8  # of a step


class StepLines(msgspec.Struct, frozen=True):
    """Source lines of a step. `lines` are FILE:LINE, "" for calls without one; other fields are
    indices.

    `reducing` are lines that only reduce. Per parameter, `given` are the lines of calls that
    received memory of its gradient, and `perhaps` those that may have received copies; a parameter
    without a gradient has neither, and is not in `known`.
    """

    lines: Annotated[tuple[str, ...], Meta(max_length=_MOST_LINES)]
    reducing: tuple[_Number, ...]
    given: tuple[tuple[_Number, ...], ...]
    perhaps: tuple[tuple[_Number, ...], ...]
    known: tuple[bool, ...]


def write_lines(index: mmap.mmap, layout: TraceLayout, at: int, lines: StepLines) -> None:
    """Write lines to their place, if they fit."""
    data = msgspec.msgpack.encode(lines)
    if len(lines.lines) <= _MOST_LINES and len(data) <= layout.line_bytes - _LENGTH:
        index[at + _LENGTH : at + _LENGTH + len(data)] = data
        index[at : at + _LENGTH] = len(data).to_bytes(_LENGTH, "little")


def read_lines(index: mmap.mmap, layout: TraceLayout, at: int) -> StepLines | None:
    """Read lines; None if there are none, or they are malformed."""
    length = int.from_bytes(index[at : at + _LENGTH], "little") if layout.line_bytes else 0
    if not 0 < length <= layout.line_bytes - _LENGTH:
        return None
    data, parameters = index[at + _LENGTH : at + _LENGTH + length], len(layout.model.parameters)
    try:
        found = msgspec.msgpack.decode(data, type=StepLines)
    except msgspec.MsgspecError:
        return None
    numbers = {*found.reducing}.union(*found.given, *found.perhaps)
    sizes = {len(found.given), len(found.perhaps), len(found.known)}
    return found if sizes == {parameters} and max(numbers, default=-1) < len(found.lines) else None


def room_for_lines(parameters: int) -> int:
    """Return the bytes for a step's lines: some paths, and a few numbers per parameter."""
    return 1024 + 16 * parameters


def lines_of(
    names: Mapping[str, bool],
    given: Mapping[str, frozenset[str]],
    perhaps: Mapping[str, frozenset[str]],
    reducing: frozenset[str],
) -> StepLines:
    """Return the lines of parameters; `names`, in layout order, maps to True with a gradient."""
    nothing = frozenset[str]()
    lines = sorted(nothing.union(*given.values(), *perhaps.values()))
    number = {line: place for place, line in enumerate(lines[:256])}

    def of(ways: Mapping[str, frozenset[str]], name: str) -> tuple[int, ...]:
        return tuple(sorted(number[line] for line in ways.get(name, nothing) if line in number))

    return StepLines(
        lines=tuple(lines),
        reducing=tuple(number[line] for line in lines if line in reducing and line in number),
        given=tuple(of(given, name) for name in names),
        perhaps=tuple(of(perhaps, name) for name in names),
        known=tuple(names.values()),
    )
