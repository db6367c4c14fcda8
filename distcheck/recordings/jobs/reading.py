"""Reads a recording, rank by rank and step by step. Its files may be damaged."""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from distcheck import private
from distcheck.errors import CannotRunError, UsageError
from distcheck.machine.numerics import real_parts
from distcheck.machine.resources import available_bytes
from distcheck.recordings.jobs.records import (
    ForwardPass,
    RankRecord,
    RereadSamples,
    SavedRecordingFiles,
    StepRecord,
    checksum_of,
    digest,
    rank_folder,
    read_record,
    with_masked_command,
    write_json,
)
from distcheck.recordings.jobs.sketches import project
from distcheck.recordings.jobs.watched import SUMS, WatchedStep
from distcheck.recordings.recording import Entry, EntryState, Kind

MOST_RANKS, MOST_NOTES = 1024, 1 << 16
REPORT = "report.json"  # next to the ranks' folders of a kept recording
MANIFEST, FORM = "recording.json", 4
MOST_BYTES = 64 << 30  # of one step of one rank


STEMS = {Kind.LOCAL_GRADIENT: "local", Kind.EXCHANGED: "raw", Kind.GRADIENT: "step"}
_OF_STATE = {
    Kind.PARAMETER: ["before/", "after/"], Kind.BUFFER: ["buffer/"], Kind.OPTIMIZER: ["optim/"],
}  # fmt: skip
_NOT_RECORDED = Entry(EntryState.UNWRITTEN, b"")


class JobStepHeader(NamedTuple):
    """The record of a rank's step without tensors, in the common form of all recordings."""

    ids: tuple[str, ...]
    loss: float
    rng_digest: bytes
    optimizer: str


class TensorCache:
    """Cache of tensors, limited to a quarter of the memory (heuristic)."""

    def __init__(self) -> None:
        self._found: dict[object, dict[str, torch.Tensor]] = {}
        self._bytes = 0

    def get(
        self, key: object, read_recording: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        if key not in self._found:
            found = read_recording()
            size = sum(one.numel() * one.element_size() for one in found.values())
            if self._bytes + size > available_bytes() // 4:
                self._found, self._bytes = {}, 0
            self._found[key], self._bytes = found, self._bytes + size
        return self._found[key]

    def peek(self, key: object) -> dict[str, torch.Tensor] | None:
        """Return the cached tensors of a key, or None."""
        return self._found.get(key)


@dataclass
class JobRecording:
    """All ranks of a job. `steps` are the steps that every rank has written, with the numbers of
    the job. A slot is an index into `steps`.
    """

    folder: Path
    ranks: tuple[RankRecord, ...]
    steps: tuple[int, ...]
    records: dict[tuple[int, int], StepRecord]
    uneven: dict[int, int] = field(default_factory=dict)  # rank: steps, if these differ
    drawn: dict[int, set[str]] = field(default_factory=dict)  # rank: RNG streams of its loaders
    alike: dict[tuple[int, int, int], tuple[str, ...]] = field(default_factory=dict)  # samples
    # that ranks read under equal RNG streams, by rank, loader, index: leaves, the largest first
    apart: "JobRecording | None" = None  # as written by its ranks, if this one is unsharded
    replicas: tuple[tuple[int, ...], ...] = ()  # the ranks that form each rank here
    joined: dict[int, int] = field(default_factory=dict)  # micro-batches per step, each
    # one forward pass here
    moved: frozenset[int] = frozenset()  # steps whose local gradients include `cleared/`
    _kept: TensorCache = field(default_factory=TensorCache)
    _names: dict[Kind, list[str]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.ranks[0].world

    @property
    def processes(self) -> int:
        """The number of ranks of the job. Ranks that train one model may be one rank here."""
        return self.world if self.apart is None else self.apart.world

    def called(self, rank: int) -> int:
        return self.replicas[rank][0] if self.replicas else rank

    @property
    def divided_by(self) -> str:
        """Return the library whose shards could not be unsharded, or ""."""
        return self.ranks[0].divided_by

    def at(self, step: int) -> list[StepRecord]:
        return [self.records[rank.rank, step] for rank in self.ranks]

    def by_loss(self, rank: int, step: int) -> list[list[ForwardPass]]:
        """Return the passes with a loss, by loss (`StepRecord.by_loss`)."""
        return self.records[rank, step].by_loss(self._constant_targets(rank))

    def _constant_targets(self, rank: int) -> set[str]:
        """Return the targets of several elements that an optimizer's losses have at every step of
        it on a rank, for different samples: labels as in a GAN, not one batch for all steps.
        """
        steps: dict[int, list[dict[str, tuple[str, ...]]]] = {}  # samples by target
        for record in (self.records[rank, step] for step in self.steps):
            calls = [(c, one.rows) for one in record.passes for c in one.losses if c.counted > 1]
            steps.setdefault(record.number, []).append({c.target: rows for c, rows in calls})
        return {
            target
            for found in steps.values()
            for target in found[0]
            if target and len(found) > 1 and all(target in one for one in found)
            if not found[0][target] or len({one[target] for one in found}) > 1
        }

    def tensors(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        """Return the tensors of one rank at one step. Raises UsageError if they are damaged."""
        return self._kept.get((rank, step), lambda: self._added(rank, step))

    def _added(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        """Return a step's tensors, with moved gradients among the local ones."""
        found = self._read(rank, step)
        passes = len(self.records[rank, step].trained)
        for name in [n.removeprefix("cleared/") for n in found if n.startswith("cleared/")]:
            if step not in self.moved:
                break
            cleared, size = found[f"cleared/{name}"], found[f"cleared-sizes/{name}"]
            local = found.get(f"local/{name}", torch.zeros_like(cleared))
            found[f"sizes/{name}"] = found.get(f"sizes/{name}", real_parts(local).abs()) + size
            found[f"local/{name}"] = local + cleared
            norm = found.get(f"norms/{name}", torch.zeros(()))
            # Derived: the sum of n norms is at most sqrt(n) times that of the summed magnitudes.
            found[f"norms/{name}"] = norm + math.sqrt(passes) * torch.linalg.vector_norm(size)
        return found

    def _read(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        """Read a step's file, and parameters that are only in the previous step's
        (`job.inside.step_file`).
        """
        found, digests = self._file_of(rank, step), self.records[rank, step].digests
        earlier = self.records.get((rank, step - 1))
        if earlier is None or not (earlier.whole and self.records[rank, step].whole):
            return found
        left = {}
        for name, own in digests.items():
            kind, _, parameter = name.removeprefix("start/").partition("/")
            after = f"after/{parameter}"
            is_here = name in found or f"sums/{name}" in found
            if kind == "before" and not is_here and own == earlier.digests.get(after):
                left[name] = after
        if left:
            before = self._kept.peek((rank, step - 1)) or self._file_of(rank, step - 1)
            found |= {name: before[after] for name, after in left.items() if after in before}
        return found

    def _file_of(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        file = rank_folder(self.folder, rank) / f"step-{step:06d}.safetensors"
        return read_tensors(file, self.records[rank, step].checksum)

    def gradient(self, kind: Kind, rank: int, step: int, name: str) -> torch.Tensor | None:
        """Return a gradient of a parameter, which is stored once while it does not change."""
        digests, stem = self.records[rank, step].digests, f"{STEMS[kind]}/{name}"
        if stem not in digests:
            return None
        found = self.tensors(rank, step)
        return found.get(stem if stem in found or kind is not Kind.GRADIENT else f"raw/{name}")

    def parameters(self, step: int) -> tuple[str, ...]:
        """Return the names of the optimizers' parameters, in the order of rank 0's model."""
        stepped = {name for record in self.at(step) for name in _names_of("after/", record)}
        known = dict.fromkeys((*_names_of("before/", self.records[0, step]), *sorted(stepped)))
        return tuple(name for name in known if name in stepped)

    def holders(self, step: int, name: str) -> list[int]:
        """Return the ranks whose optimizer has a parameter: all, unless optimizers are sharded."""
        return [rank for rank in range(self.world) if self.holds(rank, step, name)]

    def holds(self, rank: int, step: int, name: str) -> bool:
        return f"after/{name}" in self.records[rank, step].digests

    def sums(self, rank: int, step: int, name: str) -> torch.Tensor | None:
        """Return the 64 projections of a state such as `after/weight`, recorded or computed."""
        kept = self.tensors(rank, step)
        return project(kept[name]) if name in kept else kept.get(f"sums/{name}")

    def modules(self, rank: int, step: int) -> WatchedStep | None:
        """Return a rank's module inputs and outputs, None if absent. Raises UsageError."""
        watched = self.records[rank, step].modules
        if watched is None:
            return None
        sums = self.tensors(rank, step).get(SUMS)
        if sums is None or not watched.fits(sums):
            file = rank_folder(self.folder, rank) / f"step-{step:06d}.json"
            raise UsageError(
                f"{file} is damaged: its modules have other tensors; run distcheck job again"
            )
        return WatchedStep(watched, sums)

    # -- interface of every recording --------------------------------------------------------------

    def names(self, kind: Kind) -> list[str]:
        if kind not in self._names:
            stems = _OF_STATE.get(kind, ["before/", "after/"])
            known = kind in STEMS or kind in _OF_STATE
            found = (
                _names_of(stem, self.records[0, step]) for step in self.steps for stem in stems
            )
            self._names[kind] = list(dict.fromkeys(chain(*found))) if known else []
        return self._names[kind]

    def steps_written(self) -> int:
        return len(self.steps)

    def header(self, rank: int, step: int) -> JobStepHeader:
        """Return the samples of a step's forward passes, and their total loss."""
        record = self.records[rank, self.steps[step]]
        passes = [one for one in record.passes if one.live]
        drawn = [one for one in passes if one.draws or one.drew]  # others use no random numbers
        streams = [one.random.get(name, "") for one in drawn for name in ("torch", "cuda")]
        return JobStepHeader(
            ids=tuple(row for one in passes for row in one.rows),
            loss=sum(one.loss or 0.0 for one in record.trained) if record.trained else math.nan,
            rng_digest=bytes.fromhex(digest("".join(streams).encode())),
            optimizer="; ".join(
                ", ".join(f"{name} {value:.9g}" for name, value in group.items())
                for group in record.groups
            ),
        )

    def entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        """Return the entry of a rank's tensor; unwritten if a different optimizer stepped."""
        step, name = self._place(kind, slot, index)
        if step is None:
            return _NOT_RECORDED
        digests = self.records[rank, step].digests
        if name in digests:
            return Entry(EntryState.STORED, bytes.fromhex(digests[name]))
        parameter = name.partition("/")[2]
        was_there = kind in STEMS and f"after/{parameter}" in digests
        return Entry(EntryState.ABSENT, b"") if was_there else _NOT_RECORDED

    def tensor(self, rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor | None:
        """Return the recorded tensor; None if over budget, or if only another rank kept it."""
        step, name = self._place(kind, slot, index)
        if step is None or not self.records[rank, step].whole:
            return None
        if kind in STEMS:
            return self.gradient(kind, rank, step, name.partition("/")[2])
        return self.tensors(rank, step).get(name)

    def _place(self, kind: Kind, slot: int, index: int) -> tuple[int | None, str]:
        """Return the step whose record has the contents of a slot, and the name there."""
        name = self.names(kind)[index]
        if kind is Kind.PARAMETER and slot:
            return self.steps[slot - 1], f"after/{name}"
        stem = STEMS.get(kind) or _OF_STATE[kind][0].rstrip("/")
        return (self.steps[slot] if slot < len(self.steps) else None), f"{stem}/{name}"


def _names_of(stem: str, record: StepRecord) -> tuple[str, ...]:
    return tuple(name.removeprefix(stem) for name in record.digests if name.startswith(stem))


def read_tensors(
    file: Path, checksum: str = "", again: str = "run distcheck job again"
) -> dict[str, torch.Tensor]:
    """Read a file of tensors and verify its checksum, if given. Raises UsageError, with the advice
    `again`, if the file is damaged, or larger than memory (a sparse file may be).
    """
    try:
        found = checksum_of(file, min(MOST_BYTES, available_bytes()))
        if checksum and found != checksum:
            raise ValueError("its checksum differs")
        tensors = load_file(file)
        others = {str(t.dtype) for t in tensors.values() if "float4" in str(t.dtype)}
        if others:
            raise ValueError(f"it holds {', '.join(others)}, in which no script can train")
        return tensors
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{file} is damaged: {error}; {again}") from error


def read_recording(folder: Path) -> JobRecording:
    """Read the recording in a folder. Raises UsageError if it is damaged or ranks are missing."""
    files = sorted(folder.glob("rank-*/rank.json"))[:MOST_RANKS]
    ranks = tuple(read_record(file, RankRecord) for file in files)
    if not ranks:
        raise UsageError(f"{folder} holds no recording; run distcheck job again")
    world = ranks[0].world
    if len(ranks) != world or [rank.rank for rank in ranks] != list(range(len(ranks))):
        there = ", ".join(str(rank.rank) for rank in ranks)
        raise UsageError(
            f"{folder} has only the ranks {there} of a world of {world}; the others failed, or "
            "ran on a machine without distcheck job before their command"
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
    read_recording = {
        (rank, one.loader, one.index): one.parts
        for rank in range(world)
        if (file := rank_folder(folder, rank) / "read.json").exists()
        for one in read_record(file, RereadSamples).samples
    }
    return JobRecording(
        folder, ranks, steps, records, {} if alike else counts, drawn, read_recording
    )


def read_saved_recording(folder: Path) -> JobRecording:
    """Read a saved recording. Raises UsageError if it is damaged, truncated or too new."""
    if not any(folder.glob("rank-*/rank.json")):
        raise UsageError(
            f"{folder} does not have the recording of a job; pass a folder that distcheck job "
            "--save wrote"
        )
    file = folder / MANIFEST
    known = read_record(file, SavedRecordingFiles) if file.exists() else None
    if known is None or known.form != FORM:
        raise UsageError(
            f"{folder} was recorded by a different version of distcheck; record the job again"
        )
    job = read_recording(folder)
    if (job.world, job.steps) != (known.world, known.steps) or not job.steps:
        raise UsageError(
            f"{folder} is truncated: it has {len(job.steps)} of its {len(known.steps)} steps; "
            "run distcheck job again"
        )
    return job


def save_recording(job: JobRecording, kept: Path) -> None:
    """Copy the files that `read_recording` needs. Raises CannotRunError if that fails."""
    folder = job.folder
    try:
        private.folder(kept, is_new=True)
        for rank in folder.glob("rank-*"):
            shutil.copytree(rank, kept / rank.name, ignore=shutil.ignore_patterns("ended"))
        for note in folder.glob("drawn-*"):
            shutil.copy(note, kept / note.name)
        for file in kept.glob("rank-*/rank.json"):  # no reference starts from here
            write_json(file, with_masked_command(read_record(file, RankRecord)))
        steps = read_recording(kept).steps
        write_json(kept / MANIFEST, SavedRecordingFiles(world=job.world, steps=steps, form=FORM))
    except (OSError, shutil.Error) as error:
        raise CannotRunError(f"the recording cannot be kept in {kept}: {error}") from error


def _records(folder: Path, world: int) -> Iterator[StepRecord]:
    for rank in range(world):
        for file in sorted(rank_folder(folder, rank).glob("step-*.json")):
            record = read_record(file, StepRecord)
            if (record.rank, f"step-{record.step:06d}") != (rank, file.stem):
                raise UsageError(f"{file} is damaged: it belongs to a different rank or step")
            yield record
