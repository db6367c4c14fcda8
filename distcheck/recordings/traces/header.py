"""The record of a rank's step without tensors, and its binary form in a trace.

The header is followed by the source lines that each gradient of the step passed through, in a space
of fixed size. Lines that do not fit are not written.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from distcheck.machine.seeds import LIBRARY_STATES_BYTES
from distcheck.recordings.traces.layout import HEADER, RNG_STATE_BYTES, TraceLayout

_NOT_COUNTED = -1  # tokens and positions of a workload without token counts


@dataclass(frozen=True, kw_only=True)
class StepHeader:
    """The record of a step without tensors.

    ids             indices of samples
    ready_order     parameter indices in the order in which backward finished their gradients
    loss_factor     derivative of backward's loss by the shard's mean loss
    rng_state       state of torch's generators
    library_states, settings, implementation   results of the functions of that name in `seeds` and
                    `optimizers`
    stretches       number of micro-batches per batch in the strategy's own backward: 1 to 255
    tokens          number of tokens in the loss, of `positions` with padding; None: not counted
    """

    ids: tuple[int, ...]
    loss: float
    loss_factor: float
    epoch: int
    rng_state: bytes
    ready_order: tuple[int, ...]
    library_states: bytes = b""
    settings: int = 0
    implementation: int = 0
    stretches: int = 1
    tokens: int | None = None
    positions: int = 0
    written: bool = True
    rng_digest: bytes = b""  # as in the trace

    @property
    def optimizer(self) -> str:
        """Return "": a case has the same optimizer settings in every run."""
        return ""

    @property
    def loss_count(self) -> int:
        """Return the number of tokens (without token counts: samples) that the loss averages."""
        return len(self.ids) if self.tokens is None else self.tokens


def write_header(index: mmap.mmap, layout: TraceLayout, at: int, header: StepHeader) -> None:
    """Write a header to its place, and mark its step as written. The RNG digest covers only torch's
    generators: any code may use the generators of libraries, and effects show elsewhere.
    """
    missing = len(layout.model.parameters) - len(header.ready_order)
    order = (*header.ready_order, *[-1] * missing)
    tail = at + HEADER.size
    for data, room in (
        (header.rng_state, RNG_STATE_BYTES),
        (header.library_states, LIBRARY_STATES_BYTES),
        (struct.pack(f"<{len(header.ids)}q", *header.ids), 8 * layout.max_shard),
        (struct.pack(f"<{len(order)}i", *order), 4 * len(order)),
    ):
        index[tail : tail + len(data)] = data
        tail += room
    counted = header.tokens is not None
    HEADER.pack_into(
        index, at, header.stretches, header.settings, header.implementation, len(header.ids),
        header.loss, header.loss_factor, header.epoch, len(header.rng_state),
        xxhash.xxh3_128_digest(header.rng_state), len(header.library_states),
        header.tokens if header.tokens is not None else _NOT_COUNTED,
        header.positions if counted else _NOT_COUNTED,
    )  # fmt: skip


def read_header(index: mmap.mmap, layout: TraceLayout, at: int) -> StepHeader:
    header = HEADER.unpack_from(index, at)
    written, settings, implementation, samples, loss, factor, epoch, *sizes = header
    rng_bytes, digest, library_bytes, tokens, positions = sizes
    at += HEADER.size
    rng_state = bytes(index[at : at + rng_bytes])
    at += RNG_STATE_BYTES
    library_states = bytes(index[at : at + library_bytes])
    at += LIBRARY_STATES_BYTES
    ids = struct.unpack_from(f"<{samples}q", index, at)
    at += 8 * layout.max_shard
    order = struct.unpack_from(f"<{len(layout.model.parameters)}i", index, at)
    return StepHeader(
        written=bool(written),
        ids=ids,
        loss=loss,
        loss_factor=factor,
        epoch=epoch,
        rng_state=rng_state,
        rng_digest=digest,
        library_states=library_states,
        ready_order=tuple(i for i in order if i >= 0),
        settings=settings,
        implementation=implementation,
        stretches=max(1, written),
        tokens=max(0, tokens) if positions >= 0 else None,
        positions=max(0, positions),
    )


_LENGTH = 4  # bytes of the length prefix
_Number = Annotated[int, Meta(ge=0, le=255)]
_MOST_LINES = 8  # of a step


class StepLines(msgspec.Struct, frozen=True):
    """Source lines of a step.

    `lines` are FILE:LINE, "" for a call without a line; all other fields are indices into it.
    `reducing` are lines that only reduce. For each parameter, `given` are the lines of calls that
    received memory of its gradient, and `perhaps` the lines of calls that may have received copies.
    A parameter without a gradient has neither, and is not in `known`.
    """

    lines: Annotated[tuple[str, ...], Meta(max_length=_MOST_LINES)]
    reducing: tuple[_Number, ...]
    given: tuple[tuple[_Number, ...], ...]
    perhaps: tuple[tuple[_Number, ...], ...]
    known: tuple[bool, ...]


def write_lines(index: mmap.mmap, layout: TraceLayout, at: int, lines: StepLines) -> None:
    """Write the source lines of a step to their place, if they fit."""
    data = msgspec.msgpack.encode(lines)
    if len(lines.lines) <= _MOST_LINES and len(data) <= layout.line_bytes - _LENGTH:
        index[at + _LENGTH : at + _LENGTH + len(data)] = data
        index[at : at + _LENGTH] = len(data).to_bytes(_LENGTH, "little")


def read_lines(index: mmap.mmap, layout: TraceLayout, at: int) -> StepLines | None:
    """Read the source lines of a step; None if there are none, or if they are malformed."""
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


def lines_capacity(parameters: int) -> int:
    """Return the bytes for the lines of a step: some paths, and a few numbers per parameter."""
    return 1024 + 16 * parameters


def index_lines(
    names: Mapping[str, bool],
    given: Mapping[str, frozenset[str]],
    perhaps: Mapping[str, frozenset[str]],
    reducing: frozenset[str],
) -> StepLines:
    """Return the lines of parameters; `names`, in layout order, map to True with a gradient."""
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
