"""What a replay hands out in place of a script's own batches: those that the ranks had."""

from collections.abc import Sequence

import torch

from distcheck.job.reading import Recording
from distcheck.job.recording import Batch, Pass

ALL = -1
Place = tuple[int, int, int]  # loader, pass over it, number of the batch
Pairs = Sequence[tuple[int, int]]  # (rank, forward pass): whose tensors come one after the other


class Feeding:
    """Batches, inputs, targets and random states of the recording, by the role that needs them."""

    def __init__(self, job: Recording) -> None:
        self._job = job
        self._batches: dict[tuple[int, int, int], dict[int, tuple[int, Batch]]] = {}
        self.lengths: dict[int, int] = {}
        for (rank, step), record in job.records.items():
            for batch in record.batches:
                key = (batch.loader, batch.epoch, batch.number)
                self._batches.setdefault(key, {})[rank] = (step, batch)
            for begun in record.iterations:
                if begun.length >= 0 and rank == 0:
                    self.lengths[begun.loader] = begun.length

    def passes(self, step: int, rank: int) -> list[Pass]:
        """The forward passes of a rank."""
        return list(self._job.records[rank, step].passes)

    def is_ahead(self, step: int) -> bool:
        """Whether a batch of this step was handed out in an earlier one, as accelerate does."""
        before = [r for (rank, s), r in self._job.records.items() if rank == 0 and s < step]
        return sum(len(r.batches) for r in before) > sum(len(r.passes) for r in before)

    def pairs(self, number: int, rank: int) -> Pairs:
        """One forward pass of a rank, or of all ranks."""
        return [(one, number) for one in (range(self._job.world) if rank == ALL else (rank,))]

    def has(self, step: int, pairs: Pairs) -> bool:
        """Whether the ranks made these forward passes."""
        world = self._job.world
        return all(r < world and number < len(self.passes(step, r)) for r, number in pairs)

    def batch(self, places: Sequence[tuple[int, Place]]) -> list[torch.Tensor] | None:
        """The leaves of batches that loaders handed out, each to a rank, one after the other."""
        found = []
        for rank, place in places:
            by_rank = self._batches.get(place, {})
            if rank not in by_rank:
                return None
            step, batch = by_rank[rank]
            found.append([self._data(rank, step, name) for name in batch.leaves])
        return _together(found)

    def inputs(self, step: int, pairs: Pairs) -> list[torch.Tensor] | None:
        """The tensors among the model's arguments in forward passes."""
        if not self.has(step, pairs):
            return None
        return _together(
            [
                [self._data(rank, step, name) for name in self.passes(step, rank)[number].inputs]
                for rank, number in pairs
            ]
        )

    def target(self, step: int, pairs: Pairs, call: int) -> torch.Tensor | None:
        """The target of a loss."""
        found = []
        for rank, number in pairs:
            calls = self.passes(step, rank)[number].losses
            if call >= len(calls) or not calls[call].target:
                return None
            found.append([self._data(rank, step, calls[call].target)])
        together = _together(found)
        return None if together is None else together[0]

    def random(self, step: int, pair: tuple[int, int]) -> torch.Tensor:
        """The state of torch's random stream before a forward pass."""
        return self._job.tensors(pair[0], step)[f"random/{pair[1]}"]

    def _data(self, rank: int, step: int, name: str) -> torch.Tensor:
        return self._job.tensors(rank, step)[f"data/{name}"]


def _together(of_ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor] | None:
    """The ranks' tensors one after the other, leaf by leaf; None where they do not fit."""
    if len(of_ranks) == 1:
        return list(of_ranks[0])
    if len({len(leaves) for leaves in of_ranks}) != 1:
        return None
    found = []
    for leaves in zip(*of_ranks, strict=True):
        if leaves[0].dim() == 0:
            found.append(leaves[0])
        elif len({leaf.shape[1:] for leaf in leaves}) != 1:
            return None
        else:
            found.append(torch.cat(leaves))
    return found
