"""Unshards a recording: merges the ranks that train one model into one rank with that model.

Purpose: checks and causes of a job assume data parallelism, in which every rank has a whole model
and reads different samples. This module reduces model parallelism to that case. The ranks of a
*unit* train one model on the same samples (axes of kind tensor, sequence or pipeline); each unit
becomes one rank of a new recording in a new folder. `apart` is the recording as written, in which
checks compare the ranks of a unit; `units` maps each new rank to the old ones.

Rules for one step of a unit:
- A tensor without a Shard is taken from the first rank of the unit that recorded it.
- A sharded tensor consists of boxes: each rank in `Shard.of` recorded its shard and offset `at`.
  Shards must fill the shape exactly; otherwise the recording is damaged (UsageError).
- Ranks in `Shard.adds` hold summands of a shard; they are added in float64, and averaged if `mean`.
- Pipeline stages contribute their layers; equal names with different initial values get the
  prefix of their stage. Losses come from the last stage.
- Experts that no rank of the unit has are taken from ranks of other units.
- Local gradients that include other units' samples, or that may be partial sums, are dropped: they
  are not the gradient of this unit's samples.
- Only unit 0 keeps whole state; of other units' state, 64 projections are kept.

Digests of unsharded tensors are recomputed, so equal models have equal digests, whatever their
sharding. Memory is allocated only after the shards are known to fit.

Example: two ranks on the mesh tensor=2 with one linear layer, weight [2, 3] sharded by rows and a
replicated bias. Both ranks read the same 4 samples. At step 0 rank 0 wrote `before/weight` [1, 3]
with Shard(shape=(2, 3), at=(0, 0), of=(0, 1)), rank 1 its row with at=(1, 0), and both wrote
`before/bias` [2]. There is one unit, (0, 1), so the new world size is 1. Its rank 0 has
`before/weight` [2, 3] with both rows, `before/bias` of old rank 0, and the 4 samples once. The
reference, which trains this model in a single process, is compared with it tensor by tensor. If old
rank 1 holds a different bias, this recording does not show it; the agreement check finds it in
`apart`. On a mesh data=2 without sharded tensors the recording is returned unchanged.
"""

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from distcheck import private
from distcheck.errors import UsageError
from distcheck.machine.shared_tensors import raw_bytes
from distcheck.recordings.jobs import reading, records, sketches
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import (
    SHARING,
    ForwardPass,
    LossCall,
    MeshAxis,
    Shard,
    rank_folder,
)
from distcheck.recordings.jobs.watched import SUMS
from distcheck.records.mesh import Mesh

STATE = ("before", "buffer", "start", "after")
_NO_FACTORS: Mapping[int, float] = {}
_OF_RANK = ("data", "random", "origin")  # not of parameters
_replace = msgspec.structs.replace


def unshard_recording(
    job: JobRecording, folder: Path, axes: Sequence[MeshAxis] = ()
) -> JobRecording:
    """Return the unsharded recording in a new folder, or the recording itself if every rank has a
    whole model. `axes` replaces the recorded axes. Raises UsageError if shards do not fit.
    """
    axes = axes or job.ranks[0].axes
    divided = any(record.parts for record in job.records.values())
    if not divided and not any(axis.kind in (*SHARING, "expert") for axis in axes):
        return job
    replicas = replica_groups(axes, job.world)
    steps = tuple(step for step in job.steps if all(record.whole for record in job.at(step)))
    private.folder(folder, is_new=True)
    for note in job.folder.glob("python-*"):
        shutil.copy(note, folder / note.name)
    for number, replica in enumerate(replicas):
        own = rank_folder(folder, number)
        private.folder(own, is_new=True)
        mine = _replace(job.ranks[replica[0]], rank=number, world=len(replicas), axes=tuple(axes))
        records.write_json(own / "rank.json", mine)
        read = rank_folder(job.folder, replica[0]) / "read.json"
        if read.exists():
            shutil.copy(read, own / "read.json")
        for step in steps:
            _Replica(job, replica, step, axes).write(own, number, len(replicas))
    found = reading.read_recording(folder)
    drawn = {n: job.drawn[u[0]] for n, u in enumerate(replicas) if u[0] in job.drawn}
    return dataclasses.replace(
        found, apart=job, replicas=replicas, drawn=drawn, uneven=job.uneven, steps=steps
    )


def replica_groups(axes: Sequence[MeshAxis], world: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that train one model on the same samples, in order."""
    mesh = mesh_of(axes)
    if mesh is None or mesh.world != world:
        return tuple((rank,) for rank in range(world))
    return tuple(mesh.groups_at([axis.name for axis in axes if axis.kind not in SHARING]))


def mesh_of(axes: Sequence[MeshAxis]) -> Mesh | None:
    return Mesh(tuple((axis.name, axis.size) for axis in axes)) if axes else None  # type: ignore[misc]


def unsharded_tensor(
    job: JobRecording, rank: int, step: int, key: str, times: Mapping[int, float] = _NO_FACTORS
) -> torch.Tensor | None:
    """Return a rank's tensor, unsharded, or None; shards are multiplied by their `times`."""
    record = job.records[rank, step]
    if key not in record.digests:
        return None
    replica = _Replica(job, (rank,), step, (), times)
    return replica.together(rank, key) if key in record.parts else replica.own(rank, key)


class _Replica:
    """One step of the ranks that train one model."""

    def __init__(
        self, job: JobRecording, ranks: Sequence[int], step: int, axes: Sequence[MeshAxis],
        times: Mapping[int, float] = _NO_FACTORS,
    ) -> None:  # fmt: skip
        self._times = times
        self._job, self._ranks, self._step, self._axes = job, ranks, step, axes
        self._records = [job.records[rank, step] for rank in ranks]
        self._kept: dict[str, torch.Tensor] = {}
        self._digests: dict[str, str] = {}
        self._parts: dict[str, Shard] = {}

    def write(self, folder: Path, number: int, world: int) -> None:
        """Write the step of the new rank."""
        first = self._records[0]
        for rank, record in zip(self._ranks, self._records, strict=True):
            held = self._job.tensors(rank, self._step)
            plain = {k: t for k, t in held.items() if k.partition("/")[0] in _OF_RANK}
            self._kept = {**plain, **self._kept}
            for key in record.digests:
                self._take(self._prefixed_name(rank, key), rank, key, whole=number == 0)
            norms = {k: t for k, t in held.items() if k.startswith("norms/")}
            for key, norm in norms.items() if len(self._ranks) == 1 else ():
                self._kept.setdefault(key, norm)
        self._take_experts(whole=number == 0)
        self._drop_unknown_locals()
        alone = len(self._ranks) == 1
        if alone and first.modules is not None:
            self._kept[SUMS] = self._job.tensors(self._ranks[0], self._step)[SUMS]
        file = folder / f"step-{self._step:06d}.safetensors"
        with private.replaced_atomically(file) as draft:
            save_file({name: one.contiguous() for name, one in self._kept.items()}, draft)
        record = _replace(
            first,
            rank=number, world=world, passes=tuple(self._passes()),
            digests=self._digests, parts=self._parts,
            dtypes={n: d for record in self._records for n, d in record.dtypes.items()},
            not_finite=tuple(dict.fromkeys(n for r in self._records for n in r.not_finite)),
            backwards=max(record.backwards for record in self._records),
            carried=any(record.carried for record in self._records),
            modules=first.modules if alone else None, ops=first.ops if alone else None,
            checksum=records.checksum_of(file),
        )  # fmt: skip
        records.write_json(file.with_suffix(".json"), record)

    # -- tensors ---------------------------------------------------------------------------------

    def _prefixed_name(self, rank: int, key: str) -> str:
        """Return the name of a rank's tensor, prefixed with its stage if another stage uses the
        same name for another tensor.
        """
        if not any(axis.kind == "pipeline" for axis in self._axes):
            return key
        kind, _, name = key.partition("/")
        stage = self._stage(rank)
        first = self._job.records[rank, self._job.steps[0]].digests
        for other in self._ranks:
            there = self._job.records[other, self._job.steps[0]].digests
            parameter = name.split("/")[0]
            own, its = first.get(f"before/{parameter}"), there.get(f"before/{parameter}")
            if self._stage(other) < stage and its is not None and its != own:
                return f"{kind}/stage {stage}: {name}"
        return key

    def _stage(self, rank: int) -> int:
        mesh = mesh_of(self._axes)
        name = next((axis.name for axis in self._axes if axis.kind == "pipeline"), "")
        return 0 if mesh is None else mesh.coordinate(rank, name)

    def _take(self, name: str, rank: int, key: str, *, whole: bool) -> None:
        """Add one tensor of a rank, unsharded if necessary."""
        if name in self._digests:
            return
        record = self._job.records[rank, self._step]
        kind = key.partition("/")[0]
        part = record.parts.get(key)
        if kind == "written":
            part = record.parts.get(f"before/{key.partition('/')[2]}")
            of = (rank,) if part is None else part.of
            said = [self._job.records[one, self._step].digests.get(key, "") for one in of]
            self._digests[name] = records.digest("".join(said).encode())
            return
        value = self.own(rank, key) if part is None else self.together(rank, key)
        if part is None or value is None:
            self._digests[name] = record.digests[key]
            if value is not None:
                self._keep(name, value, whole=whole or kind not in STATE)
            elif (sums := self._job.tensors(rank, self._step).get(f"sums/{key}")) is not None:
                self._kept[f"sums/{name}"] = sums
            return
        self._digests[name] = records.digest(raw_bytes(value))
        if part.adds:
            self._parts[name] = part
        self._keep(name, value, whole=whole or kind not in STATE)

    def _keep(self, name: str, value: torch.Tensor, *, whole: bool) -> None:
        kind, _, parameter = name.partition("/")
        if kind == "step" and self._digests.get(f"raw/{parameter}") == self._digests[name]:
            return  # the reader takes raw
        if whole:
            self._kept[name] = value.clone()
        else:
            self._kept[f"sums/{name}"] = sketches.project(value)

    def own(self, rank: int, key: str) -> torch.Tensor | None:
        if (rank, self._step) not in self._job.records:
            return None
        held = self._job.tensors(rank, self._step)
        kind, _, name = key.partition("/")
        found = held.get(key, held.get(f"raw/{name}") if kind == "step" else None)
        return found if found is None or rank not in self._times else found * self._times[rank]

    def together(self, rank: int, key: str) -> torch.Tensor | None:
        """Return the unsharded tensor of a shard; None if another rank did not record its shard."""
        part = self._job.records[rank, self._step].parts[key]
        boxes: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for one in part.of:
            record = self._job.records.get((one, self._step))
            its = None if record is None else record.parts.get(key)
            value = None if its is None else self._sum_partial(one, key, its)
            if its is None or value is None:
                return None
            boxes.append((its.at, value))
        # A recording may be damaged: check that shards fit before allocating the declared size.
        if not boxes or not all(_lies_within(at, value, part.shape) for at, value in boxes) or (
            sum(value.numel() for _, value in boxes) != math.prod(part.shape)
        ):  # fmt: skip
            raise UsageError(
                f"the shards of {key} on ranks {', '.join(map(str, part.of))} do not cover the "
                "whole tensor; use DistributedDataParallel instead, with --no-reference"
            )
        found = boxes[0][1].new_empty(part.shape)
        for at, value in boxes:
            found[tuple(slice(b, b + n) for b, n in zip(at, value.shape, strict=True))] = value
        return found

    def _sum_partial(self, rank: int, key: str, part: Shard) -> torch.Tensor | None:
        if not part.adds:
            return self.own(rank, key)
        terms = [self.own(one, key) for one in part.adds]
        there = [one.double() for one in terms if one is not None]
        if len(there) < len(terms):
            return None
        total = torch.stack(there).sum(0) / (len(there) if part.mean else 1)
        return total.to(next(one.dtype for one in terms if one is not None))

    def _take_experts(self, *, whole: bool) -> None:
        """Add tensors of experts that only other units have."""
        if not any(axis.kind == "expert" for axis in self._axes):
            return
        for rank in range(self._job.world):
            for key in self._job.records[rank, self._step].digests:
                if key.partition("/")[0] not in ("local", "sizes", "written"):
                    self._take(key, rank, key, whole=whole)

    def _drop_unknown_locals(self) -> None:
        """Drop local gradients that include other samples than this model's, or partial sums."""
        for key in [k for k in self._digests if k.startswith("local/")]:
            held = [
                (r, d)
                for r in self._ranks
                if (d := self._job.records[r, self._step].digests.get(key))
            ]
            parts = [self._job.records[rank, self._step].parts.get(key) for rank, _ in held]
            others = any(part and {*part.of, *part.adds} - {*self._ranks} for part in parts)
            plain = not any(parts) and len({own for _, own in held}) > 1
            if others or plain or self._is_expert(key):
                for kind in ("local", "sizes", "norms", "cleared", "cleared-sizes"):
                    name = f"{kind}/{key.partition('/')[2]}"
                    self._kept.pop(name, None)
                    self._digests.pop(name, None)

    def _is_expert(self, key: str) -> bool:
        """Return True if only some ranks have the tensor, along an axis of experts."""
        has = sum(key in record.digests for record in self._job.at(self._step))
        experts = any(axis.kind == "expert" for axis in self._axes)
        return experts and has < self._job.world

    # -- passes ----------------------------------------------------------------------------------

    def _passes(self) -> Iterator[ForwardPass]:
        """Yield the first rank's passes with the losses of the last stage; inputs sharded along a
        sequence become pieces.
        """
        if len(self._ranks) == 1:
            yield from self._records[0].passes
            return
        with_loss = [r for r in self._records if any(p.loss is not None for p in r.passes)]
        last = with_loss[-1] if with_loss else self._records[0]
        cut = any(axis.kind in ("tensor", "sequence") for axis in self._axes)
        for number, one in enumerate(self._records[0].passes):
            several = [r.passes[number] for r in self._records if number < len(r.passes)]
            if number < len(last.passes):
                other = last.passes[number]
                one = _replace(
                    one, loss=other.loss, losses=other.losses, terms=other.terms,
                    unread=other.unread, live=any(p.live for p in several),
                )  # fmt: skip
            one = _replace(one, draws=any(p.draws for p in several))
            yield _merge_passes(one, several) if cut else one


def _lies_within(at: Sequence[int], value: torch.Tensor, shape: Sequence[int]) -> bool:
    if not len(at) == value.dim() == len(shape):
        return False
    return all(0 <= b <= b + n <= m for b, n, m in zip(at, value.shape, shape, strict=True))


def _merge_passes(one: ForwardPass, several: Sequence[ForwardPass]) -> ForwardPass:
    inputs = [*zip(*(p.inputs for p in several), strict=True)]
    whole = [len(set(digests)) == 1 for digests in inputs]
    if all(whole):
        return one
    rows = zip(*(p.rows for p in several), strict=False)
    losses = [p.loss for p in several if p.loss is not None]
    return _replace(
        one,
        inputs=tuple(d[0] if same else "" for d, same in zip(inputs, whole, strict=True)),
        pieces=tuple(() if same else d for d, same in zip(inputs, whole, strict=True)),
        rows=tuple(records.digest("".join(of).encode()) for of in rows),
        loss=sum(losses) / len(losses) if losses else None,
        losses=tuple(
            _merge_loss_calls(calls) for calls in zip(*(p.losses for p in several), strict=False)
        ),
    )


def _merge_loss_calls(calls: Sequence[LossCall]) -> LossCall:
    counted = sum(call.counted for call in calls)
    value = sum(call.value for call in calls) / len(calls)
    same = len({call.target for call in calls}) == 1
    return _replace(calls[0], counted=counted, value=value, target=calls[0].target if same else "")
