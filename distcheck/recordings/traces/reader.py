"""A trace as the oracles and checks see it: tensors, digests and headers by rank and step."""

import mmap
from collections.abc import Sequence

import msgspec
import torch

from distcheck.machine.shared_tensors import mapped_tensor
from distcheck.recordings.recording import Entry, EntrySource, EntryState, Kind
from distcheck.recordings.traces.header import StepHeader, read_header
from distcheck.recordings.traces.layout import ENTRY, OWNED_BY, TOGETHER, TraceLayout, steps_written
from distcheck.recordings.traces.lines import StepLines, read_lines

_CPU = torch.device("cpu")


class TraceReader:
    """Reads the trace behind a file descriptor; it may still be growing. Nothing is copied, except
    to a `device` that is not the CPU. Without `tensors` the trace holds only their digests, and
    asking for a tensor raises LookupError.
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
        self.layout = layout
        self.ranks = tuple(range(layout.world))  # as they are numbered in the world that was run
        self._device = device
        self._has_tensors = tensors
        self._fd = fd
        self._baseline = baseline
        self._map = mmap.mmap(fd, layout.total_bytes, prot=mmap.PROT_READ)
        # Checks ask for a tensor many times, and mapping it takes longer than looking it up.
        self._known: dict[tuple[int, Kind, int, int], torch.Tensor] = {}

    @property
    def world(self) -> int:
        return self.layout.world

    def names(self, kind: Kind) -> list[str]:
        """The tensors of a kind, in the layout's order."""
        return [spec.name for spec in self.layout.specs(kind)]

    def of_ranks(self, ranks: Sequence[int]) -> "TraceReader":
        """The same trace as a world of these ranks alone would have written it: they are numbered
        from 0, in this order.
        """
        return self if tuple(ranks) == self.ranks else _OfRanks(self, ranks)

    def header(self, rank: int, step: int) -> StepHeader:
        return read_header(self._map, self.layout, self.layout.header_offset(rank, step))

    def lines(self, rank: int, step: int) -> StepLines | None:
        """Through which lines a rank's gradients went, where that is known."""
        return read_lines(self._map, self.layout, self.layout.lines_offset(rank, step))

    def steps_written(self) -> int:
        """How many steps, from the first, every rank has finished."""
        return steps_written(self._map, self.layout)

    def entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        """The table entry of one tensor. Of a gradient that one rank owns, every rank has the
        owner's.
        """
        owner = self.owner(rank, kind, slot, index)
        return self.own_entry(rank if owner is None else owner, kind, slot, index)

    def owner(self, rank: int, kind: Kind, slot: int, index: int) -> int | None:
        """The rank that owns what a rank recorded, by what that says; None where each has its
        own.
        """
        if kind is not Kind.GRADIENT:
            return None
        *_, order = ENTRY.unpack_from(self._map, self.layout.entry_offset(rank, kind, slot, index))
        owner = order - OWNED_BY
        return owner if 0 <= owner < self.layout.world and order != TOGETHER else None

    def own_entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        at = self.layout.entry_offset(rank, kind, slot, index)
        digest, state, source, holder, order = ENTRY.unpack_from(self._map, at)
        together = order >= OWNED_BY
        known = 0 if together else order
        return Entry(EntryState(state), digest, EntrySource(source), holder, known, together)

    def tensor(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        """The recorded tensor, mapped; None where none of the layout's shape was recorded."""
        return self._tensor_of(self.entry(rank, kind, slot, index), kind, slot, index)

    def own_tensor(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        """What the rank itself recorded, also where another rank owns it."""
        return self._tensor_of(self.own_entry(rank, kind, slot, index), kind, slot, index)

    def _tensor_of(self, entry: Entry, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        if entry.state is not EntryState.STORED:
            return None
        if not self._has_tensors:
            raise LookupError("the trace holds digests and no tensors")
        if entry.source is EntrySource.BASELINE:
            if self._baseline is None:
                raise LookupError("the rerun's trace was opened without the first run's")
            return self._baseline._mapped(entry.holder, kind, slot, index)
        return self._mapped(entry.holder, kind, slot, index)

    def tensors(self, rank: int, kind: Kind, slot: int) -> list[torch.Tensor | None]:
        count = len(self.layout.specs(kind))
        return [self.tensor(rank, kind, slot, index) for index in range(count)]

    def _mapped(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor:
        place = (rank, kind, slot, index)
        if place in self._known:
            return self._known[place]
        spec = self.layout.specs(kind)[index]
        offset = self.layout.data_offset(rank, kind, slot, index)
        tensor = mapped_tensor(self._map, getattr(torch, spec.dtype), spec.shape, offset)
        # Optimizers keep their count of steps on the CPU.
        counts_steps = kind is Kind.OPTIMIZER and not spec.shape and spec.name.endswith("/step")
        if self._device == _CPU or counts_steps:
            self._known[place] = tensor
            return tensor
        return tensor.to(self._device)


class _OfRanks(TraceReader):
    """Some of the ranks of another trace."""

    def __init__(self, whole: TraceReader, ranks: Sequence[int]) -> None:
        self.layout = msgspec.structs.replace(whole.layout, world=len(ranks))
        self.ranks = tuple(whole.ranks[rank] for rank in ranks)
        self._whole, self._chosen = whole, tuple(ranks)

    def header(self, rank: int, step: int) -> StepHeader:
        return self._whole.header(self._chosen[rank], step)

    def lines(self, rank: int, step: int) -> StepLines | None:
        return self._whole.lines(self._chosen[rank], step)

    def steps_written(self) -> int:
        return self._whole.steps_written()

    def entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        return self._whole.entry(self._chosen[rank], kind, slot, index)

    def owner(self, rank: int, kind: Kind, slot: int, index: int) -> int | None:
        return self._whole.owner(self._chosen[rank], kind, slot, index)

    def own_entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        return self._whole.own_entry(self._chosen[rank], kind, slot, index)

    def own_tensor(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        return self._whole.own_tensor(self._chosen[rank], kind, slot, index)

    def tensor(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        return self._whole.tensor(self._chosen[rank], kind, slot, index)
