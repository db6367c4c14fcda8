"""The non-tensor record of a rank's step, and its binary form in a trace."""

import mmap
import struct
from dataclasses import dataclass

import xxhash

from distcheck.machine.seeds import LIBRARY_STATES_BYTES
from distcheck.recordings.traces.layout import HEADER, RNG_STATE_BYTES, TraceLayout

_NOT_COUNTED = -1  # tokens and positions of a workload without token counts


@dataclass(frozen=True, kw_only=True)
class StepHeader:
    """The non-tensor record of a step.

    `ids` are indices of samples; `ready_order` lists parameter indices in the order in which
    backward finished their gradients. `loss_factor` is the derivative of backward's loss by the
    shard's mean loss. `rng_state` is that of torch's generators; `library_states` and `settings`
    come from the functions of that name in `seeds`, `implementation` from that in `optimizers`.
    `stretches` is the number of micro-batches per batch in the strategy's own backward: 1 to 255.
    `tokens` is the number of tokens in the loss, of `positions` with padding; None if not counted.
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
        """Empty: a case has the same settings in every run."""
        return ""

    @property
    def loss_over(self) -> int:
        """The number of tokens (without token counts: samples) in the loss's mean."""
        return len(self.ids) if self.tokens is None else self.tokens


def write_header(index: mmap.mmap, layout: TraceLayout, at: int, header: StepHeader) -> None:
    """Write a header to its place, which marks its step as written. The RNG digest covers only
    torch's generators: any code may use the libraries', and effects show elsewhere.
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
