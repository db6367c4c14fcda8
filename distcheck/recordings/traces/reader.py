"""Reads a trace: tensors, digests and headers by rank and step, for oracles and checks."""

import copy
import mmap
from collections.abc import Sequence

import msgspec
import torch

from distcheck.machine.shared_tensors import mapped_tensor
from distcheck.recordings.recording import Entry, EntrySource, EntryState, Kind
from distcheck.recordings.traces.header import StepHeader, StepLines, read_header, read_lines
from distcheck.recordings.traces.layout import ENTRY, OWNED_BY, TOGETHER, TraceLayout, steps_written

_CPU = torch.device("cpu")


class TraceReader:
    """Reads the trace behind a file descriptor, which may still be growing.

    Nothing is copied, except to a `device` other than the CPU. With `tensors` False, the trace has
    only digests, and a request for a tensor raises LookupError.
    """

    def __init__(
        self,
        fd: int,
        layout: TraceLayout,
        baseline: "TraceReader | None" = None,
        *,
        device: torch.device = _CPU,
        tensors: bool = True,
    ) -> None:
        self.layout = self._of_file = layout
        self.ranks = tuple(range(layout.world))  # as numbered in the file
        self._device = device
        self._has_tensors = tensors
        self._fd = fd
        self._baseline = baseline
        self._map = mmap.mmap(fd, layout.total_bytes, prot=mmap.PROT_READ)
        # Checks request a tensor many times, and mapping it is slower than a lookup.
        self._known: dict[tuple[int, Kind, int, int], torch.Tensor] = {}

    @property
    def world(self) -> int:
        return self.layout.world

    def names(self, kind: Kind) -> list[str]:
        return [spec.name for spec in self.layout.specs(kind)]

    def of_ranks(self, ranks: Sequence[int]) -> "TraceReader":
        """Return the trace restricted to these ranks, numbered from 0 in this order."""
        if tuple(ranks) == self.ranks:
            return self
        part = copy.copy(self)
        part.layout = msgspec.structs.replace(self.layout, world=len(ranks))
        part.ranks = tuple(self.ranks[rank] for rank in ranks)
        return part

    def header(self, rank: int, step: int) -> StepHeader:
        at = self._of_file.header_offset(self.ranks[rank], step)
        return read_header(self._map, self._of_file, at)

    def lines(self, rank: int, step: int) -> StepLines | None:
        """Return the source lines of a rank's gradients, if known."""
        at = self._of_file.lines_offset(self.ranks[rank], step)
        return read_lines(self._map, self._of_file, at)

    def steps_written(self) -> int:
        """Return the number of steps, from the first, that every rank in the file has completed."""
        return steps_written(self._map, self._of_file)

    def entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        """Return the table entry of a tensor, of its owner if a rank owns the gradient."""
        owner = self.owner(rank, kind, slot, index)
        return self._entry(self.ranks[rank] if owner is None else owner, kind, slot, index)

    def owner(self, rank: int, kind: Kind, slot: int, index: int) -> int | None:
        """Return the rank (of the file) that owns a tensor; None if no single rank owns it."""
        if kind is not Kind.GRADIENT:
            return None
        at = self._of_file.entry_offset(self.ranks[rank], kind, slot, index)
        *_, order = ENTRY.unpack_from(self._map, at)
        owner = order - OWNED_BY
        return owner if 0 <= owner < self._of_file.world and order != TOGETHER else None

    def _entry(self, place: int, kind: Kind, slot: int, index: int) -> Entry:
        at = self._of_file.entry_offset(place, kind, slot, index)
        digest, state, source, holder, order = ENTRY.unpack_from(self._map, at)
        together = order >= OWNED_BY
        known = 0 if together else order
        return Entry(EntryState(state), digest, EntrySource(source), holder, known, together)

    def tensor(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        """Return the recorded tensor, memory-mapped; None if no entry has the layout's shape."""
        return self._tensor_of(self.entry(rank, kind, slot, index), kind, slot, index)

    def own_tensor(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        """Return the tensor that this rank recorded, even if a different rank owns it."""
        return self._tensor_of(self._entry(self.ranks[rank], kind, slot, index), kind, slot, index)

    def _tensor_of(self, entry: Entry, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        if entry.state is not EntryState.STORED:
            return None
        if not self._has_tensors:
            raise LookupError("the trace holds digests and no tensors")
        if entry.source is EntrySource.BASELINE:
            if self._baseline is None:
                raise LookupError("the rerun's trace was opened without the first run's")
            return self._baseline._map_tensor(entry.holder, kind, slot, index)
        return self._map_tensor(entry.holder, kind, slot, index)

    def tensors(self, rank: int, kind: Kind, slot: int) -> list[torch.Tensor | None]:
        count = len(self.layout.specs(kind))
        return [self.tensor(rank, kind, slot, index) for index in range(count)]

    def _map_tensor(self, holder: int, kind: Kind, slot: int, index: int) -> torch.Tensor:
        place = (holder, kind, slot, index)
        if place in self._known:
            return self._known[place]
        spec = self.layout.specs(kind)[index]
        offset = self._of_file.data_offset(holder, kind, slot, index)
        tensor = mapped_tensor(self._map, getattr(torch, spec.dtype), spec.shape, offset)
        # Optimizers keep their step counters on the CPU.
        counts_steps = kind is Kind.OPTIMIZER and not spec.shape and spec.name.endswith("/step")
        if self._device == _CPU or counts_steps:
            self._known[place] = tensor
            return tensor
        return tensor.to(self._device)
