"""Ranks have different samples, and every epoch has another order."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise

from distcheck.job.reading import Recording
from distcheck.job.recording import Iteration
from distcheck.judge.checks.tally import Tally
from distcheck.records import CheckResult
from distcheck.records.layers import NO_LAYER

WITH_REPLACEMENT = "replacement"


def rows(job: Recording, rank: int, step: int) -> list[str]:
    """The digests of a rank's samples at a step: of its forward passes' inputs."""
    return [row for one in job.records[rank, step].passes for row in one.rows]


def disjoint(job: Recording) -> CheckResult:
    """No sample is on two ranks at the same step, nor within what was recorded of one epoch."""
    tally = Tally("data", NO_LAYER)
    if job.world == 1:
        tally.remark("one rank has all samples")
    for step in job.steps:
        found = {rank: rows(job, rank, step) for rank in range(job.world)}
        for rank, own in found.items():
            tally.count(parameter="samples", rank=rank, step=step, elements=len(own))
        for one, two in combinations(range(job.world), 2):
            if found[one] and Counter(found[one]) == Counter(found[two]):
                tally.fail(
                    f"step {step}: ranks {one} and {two} have the same {len(found[one])} samples",
                    parameter="samples", rank=two, step=step,
                )  # fmt: skip
    result = tally.result()
    if result.verdict != "fail":
        _within_epochs(job, tally)
    if not result.compared.elements:
        tally.missing("no tensor with samples was seen among the arguments of the model")
    return tally.result()


def _within_epochs(job: Recording, tally: Tally) -> None:
    """Of an epoch's samples few are on two ranks: DistributedSampler repeats at most one a rank."""
    seen: dict[tuple[int, int], dict[int, set[str]]] = {}
    for (rank, step), record in job.records.items():
        for batch in record.batches:
            if step in job.steps and _divides(job, batch.loader):
                of_epoch = seen.setdefault((batch.loader, batch.epoch), {})
                of_epoch.setdefault(rank, set()).update(batch.rows)
    for (_, epoch), by_rank in seen.items():
        for one, two in combinations(sorted(by_rank), 2):
            shared = len(by_rank[one] & by_rank[two])
            if shared >= job.world:
                tally.fail(
                    f"epoch {epoch}: {shared} samples of rank {one} are among those of rank {two}",
                    parameter="samples", rank=two, step=job.steps[0],
                )  # fmt: skip


def _divides(job: Recording, loader: int) -> bool:
    """Whether a loader's sampler draws each sample once."""
    found = [i for record in job.records.values() for i in record.iterations if i.loader == loader]
    return bool(found) and not any(WITH_REPLACEMENT in i.sampler for i in found)


def order(job: Recording) -> Iterator[CheckResult]:
    """Where two epochs were recorded of a loader that shuffles, their orders differ."""
    tally = Tally("epoch order", NO_LAYER)
    compared = False
    for rank in range(job.world):
        by_loader: dict[int, list[tuple[int, Iteration]]] = {}
        for step in job.steps:
            for begun in job.records[rank, step].iterations:
                if begun.shuffles and begun.sampler_epoch is not None:
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
