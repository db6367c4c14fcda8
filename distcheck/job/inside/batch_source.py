"""Provides the recorded batches with which a replay replaces the script's own."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from distcheck.job.inside.loaders import Place
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import ForwardPass, LoadedBatch

ALL = -1
Pairs = Sequence[tuple[int, int]]  # (rank, forward pass), in the order of concatenation
Leaves = list[torch.Tensor | None]  # None: the script's own tensor is correct
AND = "+"  # separates the names of tensors to concatenate


class NotTogetherError(Exception):
    """Raised if tensors of the ranks cannot be concatenated."""


class BatchSource:
    """Recorded batches, inputs, targets and RNG states, for each role of a copy."""

    def __init__(self, job: JobRecording) -> None:
        self._job = job
        self._batches: dict[Place, dict[int, tuple[int, LoadedBatch]]] = {}
        self.lengths: dict[int, int] = {}
        self.pads = False  # pads batches of different shapes before concatenating
        self._padding: dict[tuple[int, int], float] = {}  # by loader and leaf
        for (rank, step), record in sorted(job.records.items()):
            for batch in record.batches:
                key = (batch.loader, batch.epoch, batch.number)
                self._batches.setdefault(key, {})[rank] = (step, batch)
            for begun in record.iterations:
                if begun.length >= 0 and rank == 0:
                    self.lengths[begun.loader] = begun.length

    def passes(self, step: int, rank: int) -> list[ForwardPass]:
        return list(self._job.records[rank, step].passes)

    def begins_at(self, step: int) -> int:
        """Return the first step that needs work before this step: a forward pass on which this step
        was trained, or a batch that was loaded early.
        """
        found = {step}
        for rank in range(self._job.world):
            record = self._job.records[rank, step]
            found |= {earlier for earlier, _ in record.earlier}
            places = [place for one in record.passes if one.live for place in one.batches]
            found |= {self._batches[p][rank][0] for p in places if rank in self._batches.get(p, {})}
        return max(min(found), self._job.steps[0])

    def pairs(self, number: int, rank: int) -> Pairs:
        return [(one, number) for one in (range(self._job.world) if rank == ALL else (rank,))]

    def has(self, step: int, pairs: Pairs) -> bool:
        """Return True if the ranks made these forward passes."""
        world = self._job.world
        return all(r < world and number < len(self.passes(step, r)) for r, number in pairs)

    def batch(
        self, places: Sequence[tuple[int, Place]], *, longer: bool = False
    ) -> list[torch.Tensor] | None:
        """Return the leaves of several ranks' batches, concatenated; None if one was not recorded.
        With `longer`, pad by one more than necessary.
        """
        found = []
        for rank, place in places:
            by_rank = self._batches.get(place, {})
            if rank not in by_rank:
                return None
            step, batch = by_rank[rank]
            found.append([self._data(rank, step, name) for name in batch.leaves])
        if len({len(leaves) for leaves in found}) != 1:
            raise NotTogetherError("batches have different numbers of tensors")
        loader = places[0][1][0]
        together = []
        for number, parts in enumerate(zip(*found, strict=True)):
            if not _can_concatenate(parts) or (longer and self._varies(loader, number)):
                if not self.pads:
                    raise NotTogetherError("batches have different shapes")
                parts = tuple(_pad_rows(parts, self._padding_of(loader, number), longer=longer))
            together.append(_concatenate(parts))
        return together

    def place(self, loader: int, step: int, pair: tuple[int, int]) -> Place | None:
        """Return the batch of a loader that a rank's forward pass used."""
        own = self.passes(step, pair[0])[pair[1]].batches
        return next((place for place in own if place[0] == loader), None)

    def inputs(self, step: int, pairs: Pairs) -> Leaves:
        """Return the tensors among the model's arguments in forward passes."""
        of_ranks = [
            [self._data(rank, step, name) if name else None for name in one.inputs]
            for rank, number in pairs
            for one in [self.passes(step, rank)[number]]
        ]
        if len({len(leaves) for leaves in of_ranks}) != 1:
            raise NotTogetherError("models have different numbers of inputs")
        return [
            self._concatenate_or_none([part for part in parts if part is not None])
            if all(part is not None for part in parts)
            else None
            for parts in zip(*of_ranks, strict=True)
        ]

    def is_divided(self, step: int) -> bool:
        """Return True if all ranks loaded the same batch for the first pass of a step and gave
        their models different parts of it, such as parts of a sequence.
        """
        ranks = range(self._job.world)
        firsts = [(rank, one) for rank in ranks for one in self.passes(step, rank)[:1]]
        places = [(rank, place) for rank, one in firsts for place in one.batches]
        known = {self._batches[p][r][1].leaves for r, p in places if r in self._batches.get(p, {})}
        if len(places) != self._job.world or len(known) != 1:
            return False
        inputs = [self.inputs(step, self.pairs(0, rank))[:1] for rank in ranks]
        parts = [one for several in inputs for one in several if one is not None]
        whole = self.batch(places[:1]) or []
        return len(parts) > 1 and any(are_of(parts, one) for one in whole)

    def pieces(self, step: int, pairs: Pairs, place: int) -> list[torch.Tensor]:
        """Return the shards of an input that is sharded among ranks of one model."""
        known = [(rank, self.passes(step, rank)[number].pieces) for rank, number in pairs]
        return [
            self._data(rank, step, name)
            for rank, pieces in known
            for name in (pieces[place] if place < len(pieces) else ())
        ]

    def noted_with(self, step: int, first: int, number: int) -> int | None:
        """Return the forward pass with which all losses of a backward pass were recorded: the last
        of several passes since `first`, if losses were computed between them. None if each pass has
        its own losses.
        """
        passes = self.passes(step, 0)
        noted = next((p for p in range(first, len(passes)) if passes[p].losses), first)
        return noted if first < noted and number <= noted else None

    def target(self, step: int, pairs: Pairs, call: int) -> torch.Tensor | None:
        """Return the target of a loss, or None if the script's own is correct."""
        parts = []
        for rank, number in pairs:
            calls = self.passes(step, rank)[number].losses
            if call >= len(calls) or not calls[call].target:
                return None
            parts.append(self._data(rank, step, calls[call].target))
        return self._concatenate_or_none(parts)

    def _concatenate_or_none(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Concatenate tensors; None for padded batches, whose targets the script computes."""
        if self.pads and len({part.shape for part in parts}) > 1:
            return None
        return self._or_fail(parts)

    def _or_fail(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if not _can_concatenate(parts):
            raise NotTogetherError("the ranks' batches cannot be concatenated")
        return _concatenate(parts)

    def random(self, step: int, pair: tuple[int, int], *, origin: bool = False) -> torch.Tensor:
        """Return the RNG states before a forward pass or, with `origin`, at the time its batch was
        loaded.
        """
        return self._job.tensors(pair[0], step)[f"{'origin' if origin else 'random'}/{pair[1]}"]

    def _data(self, rank: int, step: int, name: str) -> torch.Tensor:
        held = self._job.tensors(rank, step)
        return self._or_fail([held[f"data/{one}"] for one in name.split(AND)])

    def _padding_of(self, loader: int, number: int) -> float:
        """Return the padding value of a leaf, inferred from batches that the script padded."""
        key = (loader, number)
        if key not in self._padding:
            self._padding[key] = padding_value(self._all_of(loader, number))
        return self._padding[key]

    def varies(self) -> bool:
        """Return True if some batches have different shapes."""
        return any(
            self._varies(loader, number)
            for loader, number in {
                (place[0], number)
                for place, by_rank in self._batches.items()
                for _, batch in by_rank.values()
                for number in range(len(batch.leaves))
            }
        )

    def _varies(self, loader: int, number: int) -> bool:
        return len({batch.shape[1:] for batch in self._all_of(loader, number)}) > 1

    def _all_of(self, loader: int, number: int) -> Iterator[torch.Tensor]:
        for place, by_rank in self._batches.items():
            for rank, (step, batch) in by_rank.items():
                if place[0] == loader and number < len(batch.leaves):
                    yield self._data(rank, step, batch.leaves[number])


def padding_value(batches: Iterator[torch.Tensor]) -> float:
    """Return the most common last value of rows; 0 if no two rows share one."""
    ends = Counter[float]()
    for batch in batches:
        if batch.dim() == 2 and batch.shape[1] and not batch.is_complex():
            ends.update(batch[:, -1].tolist())
    value, count = ends.most_common(1)[0] if ends else (0.0, 0)
    return value if count > 1 else 0.0


def _can_concatenate(parts: Sequence[torch.Tensor]) -> bool:
    return len({part.shape[1:] for part in parts}) == 1 and len({p.dim() for p in parts}) == 1


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 or parts[0].dim() == 0 else torch.cat(list(parts))


def _pad_rows(
    parts: Sequence[torch.Tensor], value: float, *, longer: bool
) -> Iterator[torch.Tensor]:
    """Yield rows padded along the second dimension to the length of the longest; with `longer`, to
    one more.
    """
    if len({part.dim() for part in parts}) != 1:
        raise NotTogetherError("batches have different numbers of dimensions")
    if parts[0].dim() < 2:
        yield from parts
        return
    length = max(part.shape[1] for part in parts) + longer
    for part in parts:
        if part.shape[2:] != parts[0].shape[2:]:
            raise NotTogetherError("batches have different shapes")
        room = (part.shape[0], length - part.shape[1], *part.shape[2:])
        yield torch.cat([part, part.new_full(room, value)], 1)


def are_of(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Return True if shards have the elements of a tensor, in any order."""
    if sum(piece.numel() for piece in pieces) != whole.numel():
        return False
    together = torch.cat([piece.detach().cpu().flatten() for piece in pieces])
    own = whole.detach().cpu().flatten().to(together.dtype)
    return torch.equal(together.sort().values, own.sort().values)
