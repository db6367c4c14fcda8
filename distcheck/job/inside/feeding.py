"""What a replay hands out in place of a script's own batches: those that the ranks had."""

from collections.abc import Sequence

import torch

from distcheck.job.reading import Recording
from distcheck.job.recording import Batch, Pass

ALL = -1


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

    def batch(self, place: tuple[int, int, int], rank: int) -> list[torch.Tensor] | None:
        """The leaves of a batch that a loader handed out: of one rank, or of all together."""
        by_rank = self._batches.get(place, {})
        ranks = range(self._job.world) if rank == ALL else (rank,)
        if any(one not in by_rank for one in ranks):
            return None
        found = []
        for one in ranks:
            step, batch = by_rank[one]
            found.append([self._data(one, step, name) for name in batch.leaves])
        return _together(found)

    def inputs(self, step: int, number: int, rank: int) -> list[torch.Tensor] | None:
        """The tensors among the model's arguments in a forward pass."""
        found = []
        for one in range(self._job.world) if rank == ALL else (rank,):
            passes = self.passes(step, one)
            if number >= len(passes):
                return None
            found.append([self._data(one, step, name) for name in passes[number].inputs])
        return _together(found)

    def target(self, step: int, number: int, call: int, rank: int) -> torch.Tensor | None:
        """The target of a loss."""
        found = []
        for one in range(self._job.world) if rank == ALL else (rank,):
            calls = self.passes(step, one)[number].losses
            if call >= len(calls) or not calls[call].target:
                return None
            found.append([self._data(one, step, calls[call].target)])
        together = _together(found)
        return None if together is None else together[0]

    def random(self, step: int, number: int, rank: int) -> torch.Tensor:
        """The state of torch's random stream before a forward pass."""
        return self._job.tensors(rank, step)[f"random/{number}"]

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
