"""Writes tensors and step headers of one rank into the trace."""

import mmap
import os

import torch
import xxhash

from distcheck.machine.shared_tensors import raw_bytes, write_at
from distcheck.recordings.recording import EntrySource, EntryState, Kind
from distcheck.recordings.traces.header import StepHeader, StepLines, write_header, write_lines
from distcheck.recordings.traces.layout import ENTRY, NO_DIGEST, TraceLayout


class TraceWriter:
    """Writes one rank's part of a trace.

    Bytes are written with `pwrite`, not through a mapping, so that they do not count as the rank's
    memory. A tensor is not written if a different rank, or the same slot of the baseline run, has
    already published its digest. Two ranks that publish at the same moment may both write, which is
    redundant but correct. Local gradients are not shared between ranks, because a second backward
    overwrites their slot.
    """

    def __init__(
        self, fd: int, layout: TraceLayout, rank: int, baseline_fd: int | None = None
    ) -> None:
        self._fd = fd
        self._baseline_fd = baseline_fd
        self._layout = layout
        self._rank = rank
        self._index = mmap.mmap(fd, layout.index_bytes)
        self._baseline = (
            mmap.mmap(baseline_fd, layout.index_bytes, prot=mmap.PROT_READ)
            if baseline_fd is not None
            else None
        )

    def put(
        self, kind: Kind, slot: int, index: int, tensor: torch.Tensor | None, *, order: int = 0
    ) -> None:
        """Record a tensor or its absence, and its `memory_order`. The caller may reuse it."""
        at = self._layout.entry_offset(self._rank, kind, slot, index)
        if tensor is None:
            self._publish(at, NO_DIGEST, EntryState.ABSENT, EntrySource.OWN, self._rank, order)
            return
        spec = self._layout.specs(kind)[index]
        if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            self._publish(at, NO_DIGEST, EntryState.MALFORMED, EntrySource.OWN, self._rank, order)
            return
        # Memory of a lazily conjugated or negated tensor has the other sign.
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = raw_bytes(dense)
        digest = xxhash.xxh3_128_digest(data)
        source, holder = self._holder(kind, slot, index, digest)
        if source is EntrySource.OWN and holder == self._rank:
            write_at(self._fd, data, self._layout.data_offset(self._rank, kind, slot, index))
        self._publish(at, digest, EntryState.STORED, source, holder, order)

    def read_back(self, kind: Kind, slot: int, index: int) -> torch.Tensor:
        """Return a copy of a tensor that this rank recorded earlier."""
        at = self._layout.entry_offset(self._rank, kind, slot, index)
        _, _, source, holder, _ = ENTRY.unpack_from(self._index, at)
        fd = self._baseline_fd if source == EntrySource.BASELINE else self._fd
        assert fd is not None, "only a rerun refers to a baseline"
        spec = self._layout.specs(kind)[index]
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        if tensor.numel():
            os.preadv(fd, [raw_bytes(tensor)], self._layout.data_offset(holder, kind, slot, index))
        return tensor

    def put_header(self, step: int, header: StepHeader) -> None:
        write_header(
            self._index, self._layout, self._layout.header_offset(self._rank, step), header
        )

    def put_lines(self, step: int, lines: StepLines) -> None:
        """Record the source lines of gradients, if they fit."""
        write_lines(self._index, self._layout, self._layout.lines_offset(self._rank, step), lines)

    def _holder(self, kind: Kind, slot: int, index: int, digest: bytes) -> tuple[EntrySource, int]:
        """Return the trace and rank that already have these bytes, or this rank itself."""
        others = [r for r in range(self._layout.world) if r != self._rank]
        if kind is Kind.LOCAL_GRADIENT:
            others = []
        for table, source, ranks in (
            (self._baseline, EntrySource.BASELINE, [self._rank]),
            (self._index, EntrySource.OWN, others),
        ):
            if table is None:
                continue
            for rank in ranks:
                at = self._layout.entry_offset(rank, kind, slot, index)
                known, state, where, holder, _ = ENTRY.unpack_from(table, at)
                if state == EntryState.STORED and where == EntrySource.OWN and known == digest:
                    return source, holder
        return EntrySource.OWN, self._rank

    def _publish(
        self,
        at: int,
        digest: bytes,
        state: EntryState,
        source: EntrySource,
        holder: int,
        order: int = 0,
    ) -> None:
        # The state byte is written last: a peer that sees STORED also sees the digest.
        ENTRY.pack_into(self._index, at, digest, EntryState.UNWRITTEN, source, holder, order)
        self._index[at + 16] = state
