"""Checks that ranks train on different samples, and that every epoch has a different order.

A sample is identified by its sampler index, or by its content if it has no index. In the second
case, rows that one rank reads twice in an epoch are ignored. If ranks read different content for
the same indices, each rank has its own data set, unless some field of every sample is the same. If
reading also draws random numbers, it is unclear whether the data sets differ, and the result is
unknown. If all ranks read the same batch and each takes every W-th row, they have different
samples.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import torch

from distcheck.job.inside import tensors
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import MOST_ROWS, LoadedBatch, LoaderIteration
from distcheck.records import CheckResult, FindingKind
from distcheck.records.layers import NO_LAYER

WITH_REPLACEMENT = "replacement"
ALIKE = "draw the same random numbers to produce their samples"
_MOST = 8  # maximum number of batches whose leaves are compared
Place = tuple[int, int, int]
Key = object  # identifies a sample


@dataclass
class _Trained:
    """The batches on which ranks trained, by place, each with the step that loaded it."""

    batches: dict[tuple[int, Place], tuple[int, LoadedBatch]] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)  # loaders with a separate data set per rank
    unclear: set[int] = field(default_factory=set)  # loaders with separate data or augmentation
    split: set[int] = field(default_factory=set)  # whose batches all ranks read, each for its rows


def samples(job: JobRecording, rank: int, step: int, trained: "_Trained") -> list[Key]:
    record = job.records[rank, step]
    passes = [one for one in record.passes if one.live]
    places = dict.fromkeys(place for one in passes for place in one.batches)
    batches = [trained.batches[rank, p][1] for p in places if (rank, p) in trained.batches]
    if batches and all(b.indices and b.loader not in trained.own | trained.split for b in batches):
        return [(batch.loader, index) for batch in batches for index in batch.indices]
    return [row for one in passes for row in one.rows]


def disjoint_samples(job: JobRecording) -> CheckResult:
    """Check that no sample is on two ranks within one step, or within the recorded part of one
    epoch.
    """
    tally, trained = Tally("data", NO_LAYER), _trained_samples(job)
    padded = _padded_passes(job, trained)
    if job.processes == 1:
        tally.remark("a single rank has all samples")
    _check_shared_samples(job, tally)
    for step in job.steps:
        found = {rank: samples(job, rank, step, trained) for rank in range(job.world)}
        for rank, own in found.items():
            tally.count(parameter="samples", rank=rank, step=step, elements=len(own))
        for one, two in combinations(range(job.world), 2):
            shared = (Counter(found[one]) & Counter(found[two])).total()
            if found[one] and Counter(found[one]) == Counter(found[two]):
                said, kind = f"have the same {len(found[one])} samples", FindingKind.SAME_SAMPLES
            elif 2 * shared > min(len(found[one]), len(found[two])) and shared > 1:
                if all(_ends_padded(job, rank, step, padded) for rank in (one, two)):
                    continue
                said, kind = f"have {shared} samples in common", FindingKind.OTHER
            else:
                continue
            both = f"ranks {job.called(one)} and {job.called(two)}"
            _report(tally, trained, f"step {step}: {both} {said}", two, step, kind)
    result = tally.result()
    if result.verdict != "fail":
        _within_epochs(job, tally, trained, padded)
        _report_equal_random_samples(job, tally, trained)
    if not result.compared.elements:
        tally.missing("no tensor with samples was found among the arguments of the model")
    return tally.result()


def _check_shared_samples(job: JobRecording, tally: Tally) -> None:
    """Check that ranks of a model-parallel unit read the same samples from their loaders."""
    if job.apart is None or any(a.kind == "pipeline" for a in job.ranks[0].axes):
        return  # only the first stage of a pipeline needs samples
    for step in job.steps:
        for replica in job.replicas:
            read = [job.apart.records[rank, step].batches for rank in replica]
            ids = [[(b.loader, b.indices or b.rows) for b in batches] for batches in read]
            other = next((r for r, own in zip(replica, ids, strict=True) if own != ids[0]), None)
            if other is not None and all(ids):
                tally.fail(
                    f"step {step}: ranks {replica[0]} and {other} share a model, but read "
                    "different samples",
                    kind=FindingKind.READ_APART, parameter="samples", rank=other, step=step,
                )  # fmt: skip
                return


def _trained_samples(job: JobRecording) -> _Trained:
    found = _Trained()
    for (rank, step), record in job.records.items():
        for batch in record.batches:
            place = (batch.loader, batch.epoch, batch.number)
            found.batches[rank, place] = (step, batch)
    used = {
        (rank, place)
        for (rank, step), record in job.records.items()
        if step in job.steps
        for one in record.passes
        if one.live
        for place in one.batches
    }
    found.batches = {key: value for key, value in found.batches.items() if key in used}
    for loader in {batch.loader for _, batch in found.batches.values()}:
        if _is_split(job, found, loader):
            found.split.add(loader)
            continue
        differs, unclear = _has_per_rank_data(job, found, loader)
        if differs:
            (found.unclear if unclear else found.own).add(loader)
    return found


def _is_split(job: JobRecording, trained: _Trained, loader: int) -> bool:
    """Return True if all ranks together gave their models as many rows as a single rank
    has read.
    """
    read = [len(b.indices) for (_, place), (_, b) in trained.batches.items() if place[0] == loader]
    given = [
        len(one.rows)
        for step in job.steps
        for record in job.at(step)
        for one in record.passes
        if one.live and any(place[0] == loader for place in one.batches)
    ]
    is_known = all(read) and max(given, default=0) < MOST_ROWS
    return job.world > 1 and is_known and sum(read) == job.world * sum(given) > 0


def _has_per_rank_data(job: JobRecording, trained: _Trained, loader: int) -> tuple[bool, bool]:
    """Return True if the same index of a loader gives a different sample on each rank. The second
    value is True if this is unclear.

    If samples come from files, different files mean different samples, and the same file means the
    same sample. Otherwise, samples that were read with equal RNG states decide. Without these, the
    trained batches decide: only their largest tensor, because ranks may have equal labels in the
    same order.
    """
    by_index: dict[int, dict[int, tuple[int, LoadedBatch, int]]] = {}
    for (rank, place), (step, batch) in trained.batches.items():
        for row, index in enumerate(batch.indices if place[0] == loader else ()):
            by_index.setdefault(index, {}).setdefault(rank, (step, batch, row))
    met = [[*ranks.items()][:2] for ranks in by_index.values() if len(ranks) > 1]
    if not met:
        return False, False
    named = [{b.files[row] for _, (_, b, row) in pair if b.files} for pair in met]
    if any(len(files) > 1 for files in named):
        return True, False
    if all(named) and len(set.union(*named)) == len(met) > 1:
        return False, False
    read: dict[int, list[tuple[str, ...]]] = {}
    for (_, number, index), parts in job.alike.items():
        read.setdefault(index, []).extend([parts] if number == loader else [])
    if any(len(several) > 1 for several in read.values()):
        return all(len({parts[0] for parts in several}) > 1 for several in read.values()), False
    pairs = [[_row_of(job, rank, *about) for rank, about in pair] for pair in met[:_MOST]]
    equal = [[a == b for a, b in zip(one, two, strict=False)] for one, two in pairs]
    same = [all(of_part) for of_part in zip(*equal, strict=False)]
    drawn = any(batch.drawn for pair in met for _, (_, batch, _) in pair)
    return same[:1] != [True], drawn or any(same)


def _row_of(job: JobRecording, rank: int, step: int, batch: LoadedBatch, row: int) -> list[str]:
    nothing = torch.empty(0)
    kept = [job.tensors(rank, step).get(f"data/{name}", nothing) for name in batch.leaves]
    kept.sort(key=lambda one: -one.numel())
    parts = [tensors.digests_of_samples([leaf]) for leaf in kept]
    return [rows[row] if row < len(rows) else "" for rows in parts]


def _last_batches(job: JobRecording) -> set[tuple[int, int, int, int]]:
    return {
        (rank, one.loader, one.epoch, one.length - 1)
        for (rank, _), record in job.records.items()
        for one in record.iterations
    }


def _ends_padded(job: JobRecording, rank: int, step: int, padded: set[tuple[int, int]]) -> bool:
    """Return True if a rank's step was trained only on last batches of padded passes."""
    places = {p for one in job.records[rank, step].passes if one.live for p in one.batches}
    last = _last_batches(job)
    return bool(places) and all(p[:2] in padded and (rank, *p) in last for p in places)


def _padded_passes(job: JobRecording, trained: _Trained) -> set[tuple[int, int]]:
    """Return the passes over loaders in which the ranks together read every sample, and read some
    again to fill their last batches, as accelerate does.
    """
    sizes = {
        (one.loader, one.epoch): (one.length, one.samples)
        for record in job.records.values()
        for one in record.iterations
    }
    read: dict[tuple[int, int], list[LoadedBatch]] = {}
    for (_, place), (_, batch) in trained.batches.items():
        read.setdefault(place[:2], []).append(batch)
    padded = set()
    for one_pass, batches in read.items():
        length, samples = sizes.get(one_pass, (0, 0))
        indices = [index for batch in batches for index in batch.indices]
        of_last = sum(len(batch.indices) for batch in batches if batch.number == length - 1)
        is_complete = len(batches) == length * job.world and len(set(indices)) == samples
        if is_complete and len(indices) - samples < of_last:
            padded.add(one_pass)
    return padded


def _within_epochs(
    job: JobRecording, tally: Tally, trained: _Trained, padded: set[tuple[int, int]]
) -> None:
    """Check that ranks share few samples of an epoch: DistributedSampler repeats one sample per
    rank, and other samplers may fill the last batch with samples that were read before.
    """
    last = _last_batches(job)
    seen: dict[tuple[int, int], dict[int, Counter[Key]]] = {}
    for (rank, place), (_, batch) in trained.batches.items():
        may_be_filled = (place[2] > 0 or place[:2] in padded) and (rank, *place) in last
        if _divides(job, batch.loader) and not (batch.loader in trained.split or may_be_filled):
            is_known = batch.indices and batch.loader not in trained.own
            of_epoch = seen.setdefault(place[:2], {})
            of_epoch.setdefault(rank, Counter()).update(batch.indices if is_known else batch.rows)
    for (_, epoch), by_rank in seen.items():
        twice = {key for own in by_rank.values() for key, count in own.items() if count > 1}
        for one, two in combinations(sorted(by_rank), 2):
            shared = len((by_rank[one].keys() & by_rank[two].keys()) - twice)
            if shared >= job.world:
                said = f"epoch {epoch}: ranks {one} and {two} have {shared} samples in common"
                _report(tally, trained, said, two, job.steps[0])


def _report(
    tally: Tally, trained: _Trained, said: str, rank: int, step: int,
    kind: FindingKind = FindingKind.OTHER,
) -> None:  # fmt: skip
    if trained.unclear and tally.result().verdict != "unknown":
        tally.missing(
            f"{said} by their indices, but the content differs in every field: either each rank "
            "has its own data, or they augment the same samples; run the job once without "
            "augmentation"
        )
    elif not trained.unclear:
        tally.fail(said, parameter="samples", rank=rank, step=step, kind=kind)


def _report_equal_random_samples(job: JobRecording, tally: Tally, trained: _Trained) -> None:
    """Report pairs of ranks that generate their samples from the same random numbers."""
    for (rank, place), (step, batch) in trained.batches.items():
        for other in range(rank if place[0] not in trained.split else 0):
            _, theirs = trained.batches.get((other, place), (0, None))
            same = theirs is not None and batch.drawn.items() & theirs.drawn.items()
            if same:
                streams = ", ".join(sorted(name for name, _ in same))
                tally.fail(
                    f"step {step}: ranks {other} and {rank} {ALIKE} ({streams})",
                    kind=FindingKind.SAME_RANDOMNESS, parameter="samples", rank=rank, step=step,
                )  # fmt: skip

    for one, two in combinations(sorted(() if trained.split else job.drawn), 2):
        if common := job.drawn[one] & job.drawn[two]:
            names = ", ".join(sorted({stream.partition("-")[0] for stream in common}))
            tally.fail(
                f"ranks {one} and {two} {ALIKE} ({names}, in the processes of their loaders)",
                kind=FindingKind.SAME_RANDOMNESS, parameter="samples", rank=two, step=job.steps[0],
            )  # fmt: skip


def _divides(job: JobRecording, loader: int) -> bool:
    """Return True if the sampler of a loader draws each sample once."""
    found = [i for record in job.records.values() for i in record.iterations if i.loader == loader]
    return bool(found) and not any(WITH_REPLACEMENT in i.sampler for i in found)


def order(job: JobRecording) -> Iterator[CheckResult]:
    """Check that two recorded epochs of a shuffling loader have different orders."""
    tally = Tally("epoch order", NO_LAYER)
    compared = False
    for rank in range(job.world):
        by_loader: dict[int, list[tuple[int, LoaderIteration]]] = {}
        passes = (one for step in job.steps for one in job.records[rank, step].passes)
        used = {place[:2] for one in passes if one.live for place in one.batches}
        for step in job.steps:
            for begun in job.records[rank, step].iterations:
                is_used = (begun.loader, begun.epoch) in used or not used
                if begun.shuffles and begun.sampler_epoch is not None and is_used:
                    by_loader.setdefault(begun.loader, []).append((step, begun))
        for found in by_loader.values():
            for (_, before), (step, after) in pairwise(found):
                compared = True
                tally.count(parameter="order", rank=rank, step=step, elements=1)
                if before.sampler_epoch == after.sampler_epoch:
                    tally.fail(
                        f"epoch {after.epoch} has the order of epoch {before.epoch}: "
                        f"{after.sampler}.epoch is {after.sampler_epoch} in both",
                        parameter="order", rank=rank, step=step,
                    )  # fmt: skip
    if compared:
        yield tally.result()
