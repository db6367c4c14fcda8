"""A recording again, read rank by rank and step by step; files there may be damaged."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from distcheck.errors import UsageError
from distcheck.job import recording
from distcheck.job.recording import RankRecord, StepRecord
from distcheck.records.decoding import read_bounded

MOST_RANKS, MOST_NOTES = 1024, 1 << 16
MOST_BYTES = 64 << 30  # of one step of one rank


@dataclass
class Recording:
    """All ranks of a job. `steps` are those that every rank has written."""

    folder: Path
    ranks: tuple[RankRecord, ...]
    steps: tuple[int, ...]
    records: dict[tuple[int, int], StepRecord]
    uneven: dict[int, int] = field(default_factory=dict)  # rank: steps, where they are not alike
    drawn: dict[int, set[str]] = field(default_factory=dict)  # rank: streams of its loaders
    _loaded: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.ranks[0].world

    @property
    def divided_by(self) -> str:
        """What makes ranks hold parts of one model that are not put together here."""
        return self.ranks[0].divided_by

    def at(self, step: int) -> list[StepRecord]:
        """The records of one step, by rank."""
        return [self.records[rank.rank, step] for rank in self.ranks]

    def tensors(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        """All that was kept of one step of one rank. Raises UsageError where that is damaged."""
        key = (rank, step)
        if key not in self._loaded:
            for old in [k for k in self._loaded if k[1] != step]:
                del self._loaded[old]
            self._loaded[key] = self._load(rank, step)
        return self._loaded[key]

    def _load(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        file = recording.rank_folder(self.folder, rank) / f"step-{step:06d}.safetensors"
        try:
            data = read_bounded(file, min(file.stat().st_size, MOST_BYTES))
            if recording.digest(data) != self.records[rank, step].checksum:
                raise ValueError("its checksum differs")
            return load(data)
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"{file} is damaged: {error}; run distcheck job again") from error

    def gradient(self, kind: str, rank: int, step: int, name: str) -> torch.Tensor | None:
        """`local`, `raw` or `step` of a parameter; what a step holds twice is written once."""
        found = self.tensors(rank, step)
        digests = self.records[rank, step].digests
        if f"{kind}/{name}" not in digests:
            return None
        if f"{kind}/{name}" in found:
            return found[f"{kind}/{name}"]
        return found.get(f"raw/{name}") if kind == "step" else None

    def parameters(self, step: int) -> tuple[str, ...]:
        """The names of what the optimizer of a step has, in the order of rank 0's model."""
        return tuple(
            name.removeprefix("after/")
            for name in self.records[0, step].digests
            if name.startswith("after/")
        )


def read(folder: Path) -> Recording:
    """The recording in a folder. Raises UsageError where it is damaged or ranks are missing."""
    files = sorted(folder.glob("rank-*/rank.json"))[:MOST_RANKS]
    ranks = tuple(recording.read_rank(file) for file in files)
    if not ranks:
        raise UsageError(f"{folder} holds no recording; run distcheck job again")
    world = ranks[0].world
    if len(ranks) != world or [rank.rank for rank in ranks] != list(range(len(ranks))):
        there = ", ".join(str(rank.rank) for rank in ranks)
        raise UsageError(
            f"{folder} holds the ranks {there} of a world of {world}; every rank must write into "
            "one folder, which all machines can see"
        )
    records = {(r.rank, r.step): r for r in _records(folder, world)}
    counts = {rank: sum(r == rank for r, _ in records) for rank in range(world)}
    common = [s for _, s in records if all((rank, s) in records for rank in range(world))]
    steps = tuple(sorted(set(common)))
    alike = len(set(counts.values())) == 1
    drawn: dict[int, set[str]] = {}
    for file in sorted(folder.glob("drawn-*"))[:MOST_NOTES]:
        rank, _, stream = file.name.removeprefix("drawn-").partition("-")
        if rank.isdecimal():
            drawn.setdefault(int(rank), set()).add(stream)
    return Recording(folder, ranks, steps, records, {} if alike else counts, drawn)


def _records(folder: Path, world: int) -> Iterator[StepRecord]:
    for rank in range(world):
        for file in sorted(recording.rank_folder(folder, rank).glob("step-*.json")):
            record = recording.read_step(file)
            if (record.rank, f"step-{record.step:06d}") != (rank, file.stem):
                raise UsageError(f"{file} is damaged: it is of another rank or step")
            yield record
