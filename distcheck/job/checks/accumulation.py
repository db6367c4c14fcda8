"""Compares accumulated gradients with the gradient of one batch. Both are computed in a single
process.

The script's passes are compared with one backward pass over all micro-batches of all ranks, so
mistakes that also occur with a single rank are detected. A constant factor is accepted, because a
loss may have a weight, unless it is the number of passes or its inverse, or varies with the number
of passes from step to step. For a loss with several terms, `terms` judges the factor. A gradient in
another direction is a mistake: micro-batches have different weights.

A gradient is within

    8 max_d |g_d - g| + gamma(A + W + 1) n + u |G|

of that factor times the one-batch gradient g, in the L2 norm. g_d and |G| are defined in
`reference`; n is the sum of the norms of the gradients of the A passes, which may cancel in their
sum.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from distcheck.job.checks import terms
from distcheck.job.fitting import fit
from distcheck.job.replaying import Reference
from distcheck.job.settings import ReplayedStep
from distcheck.judge.checks.comparison import compare_by_norm
from distcheck.judge.checks.tally import Tally
from distcheck.judge.divergence.noise_floor import NOISE_FACTOR, norm_of
from distcheck.machine.numerics import gamma, unit_roundoff
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import CheckResult
from distcheck.records.layers import IN_FLOAT32

CHECK = "accumulation"
_SAME_SCALE = 1e-3  # Heuristic: rounding leaves 1e-6, meaningful factors differ by more


@dataclass(frozen=True)
class MergedStep:
    """Fit of one step: the accumulated gradient is `factor` times the one-batch gradient.

    `left` is the relative residual. `weighted` is the factor by which the script multiplies its
    loss.
    """

    step: int
    passes: int
    kind: str
    factor: float
    left: float
    ends_epoch: bool
    weighted: bool
    raw: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    spreads: dict[str, float]


def merged_steps(job: JobRecording, reference: Reference) -> Iterator[MergedStep]:
    """Yield the steps whose micro-batches were also computed as one batch."""
    made = 0
    most = _most_passes(job, reference)
    for seen in reference.replayed.steps:
        made += len(job.records[0, seen.step].trained)
        if not seen.folded or job.records[0, seen.step].skipped:
            continue
        found = reference.tensors(seen.step)
        expected = _with_prefix(found, "folded/")
        # The gradient of the script's loss, of which every pass contributes a fraction.
        scale = most if seen.folded == "terms" else 1
        expected = {n: g * scale for n, g in expected.items()}
        raw = {n: g for n, g in _with_prefix(found, "raw/").items() if n in expected}
        fitted = fit(raw, expected)
        if fitted is None:
            continue
        (by,), left = fitted
        yield MergedStep(
            step=seen.step,
            passes=_passes(job, seen),
            kind=seen.folded,
            factor=by,
            left=left,
            ends_epoch=_ends_epoch(job, made),
            weighted=_is_weighted(job, seen, by),
            raw=raw,
            expected=expected,
            spreads={n: _spread(found, n, by * scale) for n in raw},
        )


def _is_weighted(job: JobRecording, seen: ReplayedStep, factor: float) -> bool:
    passes = _passes(job, seen)
    return any(
        _is_close(factor, wrong) and terms.may_be_intended_weight(job, 0, seen.step, wrong)
        for wrong in (float(passes), 1 / passes)
    )


def _with_prefix(found: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(kind): t for n, t in found.items() if n.startswith(kind)}


def _passes(job: JobRecording, seen: ReplayedStep) -> int:
    return len(seen.losses) or len(job.records[0, seen.step].trained)


def _most_passes(job: JobRecording, reference: Reference) -> int:
    counts = Counter(_passes(job, seen) for seen in reference.replayed.steps)
    return counts.most_common(1)[0][0] if counts else 1


def _spread(found: dict[str, torch.Tensor], name: str, factor: float) -> float:
    """Return how far the gradients change when parameters are perturbed by one ULP: the larger
    change of the two gradients that are compared.
    """
    ways = (float(found[f"spread/{name}"]), abs(factor) * float(found[f"spread-folded/{name}"]))
    return max((way for way in ways if not math.isnan(way)), default=0.0)


def _ends_epoch(job: JobRecording, made: int) -> bool:
    """Return True if a loader of rank 0 ends after this many passes, so that the step has the
    remainder of an epoch.
    """
    lengths = {
        begun.length
        for (rank, _), record in job.records.items()
        for begun in record.iterations
        if rank == 0 and begun.length > 0
    }
    return any(made % length == 0 for length in lengths)


def first_most_common_step(steps: list[MergedStep]) -> MergedStep:
    most = Counter(one.passes for one in steps).most_common(1)[0][0]
    return next(one for one in steps if one.passes == most)


def expected_factor(one: MergedStep, common: MergedStep) -> float | None:
    """Return the factor that a correct script would have, if the factor of this step is known to be
    wrong; else None.
    """
    if one.kind == "sum":
        return None
    judged = one.kind == "mean" and one.passes > 1 and one is common and not one.weighted
    for wrong in (float(one.passes), 1 / one.passes):
        if judged and _is_close(one.factor, wrong):
            return 1.0
    ratio = one.factor / common.factor
    if one.passes != common.passes and _is_close(ratio, one.passes / common.passes):
        return common.factor
    return None


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_SCALE * abs(other)


def accumulation(job: JobRecording, reference: Reference) -> Iterator[CheckResult]:
    """Yield the check result; nothing if the script does not accumulate or its passes could not be
    merged.
    """
    steps = list(merged_steps(job, reference))
    if not steps:
        return
    tally, common = Tally(CHECK, IN_FLOAT32), first_most_common_step(steps)
    for one in steps:
        factor, wanted = one.factor, expected_factor(one, common)
        if wanted is not None and one.ends_epoch and one.passes < common.passes:
            tally.remark(
                f"step {one.step}: the last {one.passes} micro-batches of the epoch have "
                f"{one.passes / common.passes:.3g}x the weight of a full step"
            )
        elif wanted is not None:
            factor = wanted
        elif one is common and one.kind == "mean" and not _is_close(factor, 1.0):
            tally.remark(
                f"gradients are {factor:.6g}x those of the mean loss, which is assumed to be a "
                "loss weight in the script"
            )
        _compare(job, tally, one, factor)
    several = [s.step for s in reference.replayed.steps if len(job.records[0, s.step].trained) > 1]
    if len(steps) < len(several):
        tally.missing(
            f"compared in {len(steps)} of the {len(several)} steps that accumulate, since "
            f"{reference.replayed.unfolded}"
        )
    yield tally.result()


def _compare(job: JobRecording, tally: Tally, one: MergedStep, factor: float) -> None:
    total = abs(factor) * math.hypot(*(norm_of(g) for g in one.expected.values()))
    bounds = {}
    for name, raw in one.raw.items():
        unit = unit_roundoff(raw.dtype)
        added = _norms(job, one.step, name) or norm_of(raw)
        bounds[name] = NOISE_FACTOR * one.spreads[name] + unit * total
        bounds[name] += gamma(one.passes + job.world + 1, unit) * added
    of_factor = math.hypot(*bounds.values()) / total  # the error of the fitted factor
    for name, raw in one.raw.items():
        expected = factor * one.expected[name].double()
        bound = bounds[name] + of_factor * norm_of(expected)
        tally.add(compare_by_norm(raw, expected, bound), parameter=name, rank=0, step=one.step)


def _norms(job: JobRecording, step: int, name: str) -> float:
    """Return the sum of the norms of the passes' gradients, averaged over ranks."""
    found = [job.tensors(rank, step).get(f"norms/{name}") for rank in range(job.world)]
    return sum(float(one) for one in found if one is not None) / job.world
