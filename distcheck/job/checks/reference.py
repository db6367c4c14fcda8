"""Compares each step with the script running as a single process on the batches of all ranks.

A gradient is within

    8 max_d |g_d - g| + gamma(W + 1) |g| + u |G|

of the reference gradient g, in the L2 norm. The g_d are the reference gradients after every
parameter was perturbed by ±1 ULP at random (measured in the same process). gamma(W + 1) |g| is the
rounding of the all-reduce (`judge/oracles/rounding.py`). u |G|, with G the gradients of all
parameters, is a floor for gradients that consist of rounding only. The factor 8 is a heuristic: the
ranks' sums are evaluated in another order in every layer, which changes a gradient about as much as
one ULP of the parameters, and two draws do not show the largest such change.

Only the gradients passed to the optimizer decide. Reduced gradients may differ, because a script
may scale the loss and unscale later.
"""

import math
from collections.abc import Collection, Iterator

import torch

from distcheck.job.checks.exchange import token_weights
from distcheck.job.fitting import fit, gradients_of_rank
from distcheck.job.replaying import Reference
from distcheck.job.settings import ReplayedStep
from distcheck.judge.checks.comparison import (
    Comparison,
    compare_by_norm,
    compare_within,
    tensor_difference,
)
from distcheck.judge.checks.tally import Tally
from distcheck.judge.divergence.noise_floor import NOISE_FACTOR, norm_of, tolerance
from distcheck.machine.numerics import gamma, unit_roundoff
from distcheck.recordings.jobs.reading import STEMS, JobRecording
from distcheck.recordings.jobs.records import StepRecord
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult
from distcheck.records.layers import IN_FLOAT32, NO_LAYER


def checks_with_reference(
    job: JobRecording, reference: Reference
) -> tuple[list[CheckResult], frozenset[int]]:
    """Return all checks against the reference in report order, and the steps at which every
    optimizer received the reference gradients and computed the reference parameters.
    """
    raw, given = Tally("gradients", IN_FLOAT32), Tally("clipped gradients", IN_FLOAT32)
    clips = any(record.clips for record in job.records.values())
    agreed, updated = set[int](), parameters(job, reference)
    for seen in reference.replayed.steps:
        found = reference.tensors(seen.step)
        if any(record.skipped for record in job.at(seen.step)):
            continue
        bounds = gradient_tolerances(job, found, seen.step)
        if not any(bounds.values()):
            raw.missing(f"step {seen.step}: every gradient of the reference is exactly zero")
            continue
        at_end = _compare_step(job, found, seen.step, Kind.EXCHANGED, bounds)
        at_step = _compare_step(job, found, seen.step, Kind.GRADIENT, _bounds_given(found, bounds))
        is_right = bool(at_step) and all(one.ok for _, _, one in at_step)
        if not is_right and seen.changes and (ratio := reference_scale(reference)) != 1.0:
            whole = {n: g * ratio if n.startswith("step/") else g for n, g in found.items()}
            again = _compare_step(
                job, whole, seen.step, Kind.GRADIENT, _bounds_given(whole, bounds)
            )
            is_right = bool(again) and all(one.ok for _, _, one in again)
            at_step = again if is_right else at_step
        was_right = all(one.ok for _, _, one in at_end)
        is_right = is_right and (was_right or _clipping_matches(job, seen, found, bounds))
        if is_right and updated.verdict == "pass":
            agreed.add(seen.step)
        _add_results(raw, at_step if is_right and not was_right else at_end, seen.step)
        if clips or seen.changes or (was_right and not is_right):
            _add_results(given, at_step, seen.step)
    of_step = given.result()
    others = [of_step] if of_step.compared.elements or of_step.verdict != "pass" else []
    results = [*losses(job, reference, agreed), *contents(reference), raw.result(), *others]
    return [*results, settings(job, reference), updated], frozenset(agreed)


def reference_scale(reference: Reference) -> float:
    """Return the factor from the gradients of the replay to those of the single-process reference.
    It differs from 1 if the loss is a sum over samples and the job averages the ranks' sums. (A
    script may multiply by the world size afterwards.)
    """
    return max(reference.replayed.scales) / reference.replayed.scale


Results = list[tuple[str, int, Comparison]]  # parameter, rank


def _compare_step(
    job: JobRecording,
    found: dict[str, torch.Tensor],
    step: int,
    kind: Kind,
    bounds: dict[str, float],
) -> Results:
    """Compare every rank's gradients of a step with the reference."""
    results: Results = []
    for name in job.parameters(step):
        expected = found.get(f"{STEMS[kind]}/{name}")
        known: dict[str, Comparison] = {}  # by digest: most ranks hold the same bits
        for rank in job.holders(step, name):
            actual = job.gradient(kind, rank, step, name)
            if (expected is None and actual is None) or name not in bounds:
                continue
            if actual is None or expected is None or actual.shape != expected.shape:
                size = math.inf if actual is None else norm_of(actual)
                other = 0.0 if expected is None else norm_of(expected)
                place = tensor_difference(size, other, math.inf, 0.0)
                results.append((name, rank, Comparison(1, worst=place, first=place)))
            else:
                held = job.records[rank, step].digests[f"{STEMS[kind]}/{name}"]
                if held not in known:
                    known[held] = compare_by_norm(actual, expected, bounds[name])
                results.append((name, rank, known[held]))
    return results


def _add_results(tally: Tally, compared: Results, step: int) -> None:
    for name, rank, one in compared:
        tally.add(one, parameter=name, rank=rank, step=step)


def gradient_tolerances(
    job: JobRecording, found: dict[str, torch.Tensor], step: int
) -> dict[str, float]:
    """Return the tolerance of every gradient. If all gradients are exactly zero, all tolerances are
    0.
    """
    raw = reference_gradients(found, Kind.EXCHANGED)
    total = math.hypot(*(norm_of(t) for t in raw.values()))
    return {
        name: tolerance(
            float(found[f"spread/{name}"]),
            norm_of(t),
            total,
            world=job.world,
            unit=unit_roundoff(t.dtype),
        )
        if total
        else 0.0
        for name, t in raw.items()
    }


def _bounds_given(found: dict[str, torch.Tensor], bounds: dict[str, float]) -> dict[str, float]:
    """Return the tolerances of optimizer gradients: those of the gradients times the clipping
    factor, plus the error of that factor (the error of the total norm, and eight roundings).
    """
    of_norm = _norm_error(found, bounds)
    clipped = {}
    for name, bound in bounds.items():
        norm, given = norm_of(found[f"raw/{name}"]), found.get(f"step/{name}")
        if given is not None:
            left = norm_of(given)
            unit = unit_roundoff(given.dtype)
            shrunk = bound * left / norm if norm else bound
            clipped[name] = shrunk + left * (of_norm + gamma(8, unit))
    return clipped


def _norm_error(found: dict[str, torch.Tensor], bounds: dict[str, float]) -> float:
    total = math.hypot(*(norm_of(found[f"raw/{name}"]) for name in bounds))
    return math.hypot(*bounds.values()) / total


def _clipping_matches(
    job: JobRecording, seen: ReplayedStep, found: dict[str, torch.Tensor], bounds: dict[str, float]
) -> bool:
    """Return True if the clipping of every rank scales by the same factor as in the reference. The
    clipped gradients do not show this: gradients that are 2x too large are clipped to the same
    result if both norms exceed the maximum.
    """
    unit = max(unit_roundoff(found[f"raw/{name}"].dtype) for name in bounds)
    room = _norm_error(found, bounds) + gamma(8, unit)
    for record in job.at(seen.step):
        for (most, norm), (most_alone, norm_alone) in paired_clips(record, seen):
            if abs(most * norm_alone - most_alone * norm) > room * most_alone * norm:
                return False
    return True


Norms = tuple[float, float]  # maximum norm of clipping, and the norm it computed


def paired_clips(record: StepRecord, seen: ReplayedStep) -> list[tuple[Norms, Norms]]:
    """Pair each call of clipping by norm in a rank's step with that of the reference."""
    own = [(one.most, one.norm) for one in record.clips if one.most is not None]
    pairs = [(most, norm) for most, norm in own if norm is not None]
    return [*zip(pairs, seen.clips, strict=True)] if len(pairs) == len(seen.clips) else []


def contents(reference: Reference) -> Iterator[CheckResult]:
    """Check that a rank's samples equal those that a single process reads for the same indices.

    If the largest field agrees and another one differs, samples are assembled incorrectly: with
    labels of other samples, or other class numbers. If the inputs differ, each rank may have its
    own augmentation.
    """
    tally = Tally("data", IN_FLOAT32)
    for read in reference.replayed.reads:
        known = [n for n, part in enumerate(read.parts) if part in ("same", "other")]
        tally.count(parameter="samples", rank=read.rank, step=0, elements=len(known))
        largest = max(known, key=lambda part: read.sizes[part], default=0)
        others = [part for part in known if read.parts[part] == "other"]
        if not others or not known:
            continue
        if read.parts[largest] == "same":
            tally.fail(
                f"rank {read.rank} reads the samples that its sampler selected, but field "
                f"{others[0]} of them (from 0) differs from a single process at the same indices",
                parameter="samples", rank=read.rank,
            )  # fmt: skip
        elif "same" in read.parts:
            tally.remark(
                f"rank {read.rank}: field {others[0]} of samples (from 0) differs from a single "
                "process at the same indices, and other fields agree"
            )
    if tally.result().compared.elements:
        yield tally.result()


def losses(
    job: JobRecording, reference: Reference, agreed: Collection[int]
) -> Iterator[CheckResult]:
    """Check that the mean of the ranks' losses equals the reference's loss. If gradients agree, the
    loss may differ, because a script may report another number than the loss on which it trains.
    """
    tally = Tally("loss", IN_FLOAT32)
    for seen in reference.replayed.steps:
        found, records = reference.tensors(seen.step), job.at(seen.step)
        if not all(record.trained for record in records) or math.isnan(float(found["loss"])):
            continue
        actual, expected, bound = paired_losses(job, reference, seen.step)
        error = abs(actual - expected)
        place = tensor_difference(actual, expected, error, bound, unit="absolute")
        ok = error <= bound or (
            seen.step in agreed and not _trained_on(job, found, seen, actual, expected)
        )
        tally.add(Comparison(1, worst=place, first=None if ok else place),
                  parameter="loss", rank=0, step=seen.step)  # fmt: skip
    result = tally.result()
    if result.compared.elements:  # not if a pass has no separate loss
        yield result


def paired_losses(job: JobRecording, reference: Reference, step: int) -> tuple[float, float, float]:
    """Return the mean of the ranks' losses, the reference's loss, and the tolerance."""
    found, records = reference.tensors(step), job.at(step)
    pairs = zip(records, token_weights(job, step), strict=True)
    actual = sum(record.loss * weight for record, weight in pairs)
    expected, spread = float(found["loss"]), float(found["spread/loss"])
    size = sum(abs(one.loss or 0.0) for record in records for one in record.trained)
    size /= records[0].scale or 1.0
    is_short = any(one.autocast for record in records for one in record.passes)
    unit = unit_roundoff("bfloat16" if is_short else "float32")
    # Derived: a loss is rounded once, and each rank's mean is a sum of its samples' losses.
    count = max(1, max(len(one.rows) for record in records for one in record.passes))
    bound = (0.0 if math.isnan(spread) else NOISE_FACTOR * spread) + unit * count * size
    return actual, expected, bound


def _trained_on(
    job: JobRecording,
    found: dict[str, torch.Tensor],
    seen: ReplayedStep,
    loss: float,
    alone: float,
) -> bool:
    """Return True if the gradients deviate by the factor of the loss, which is too small to show in
    each gradient. (A script that changes gradients later may scale its loss freely.)
    """
    if seen.changes or not alone:
        return False
    fitted = fit(
        gradients_of_rank(job, Kind.EXCHANGED, 0, seen.step),
        reference_gradients(found, Kind.EXCHANGED),
    )
    if fitted is None:
        return False
    (factor,), _ = fitted
    return abs(factor - loss / alone) < abs(factor - 1)


def reference_gradients(found: dict[str, torch.Tensor], kind: Kind) -> dict[str, torch.Tensor]:
    stem = f"{STEMS[kind]}/"
    return {n.removeprefix(stem): one for n, one in found.items() if n.startswith(stem)}


def settings(job: JobRecording, reference: Reference) -> CheckResult:
    """Check that optimizer settings, above all learning rates, equal the reference's."""
    tally = Tally("learning rate", IN_FLOAT32)
    for seen in reference.replayed.steps:
        own = job.records[0, seen.step].groups
        if seen.skipped or job.records[0, seen.step].skipped:
            continue
        tally.count(parameter="groups", rank=0, step=seen.step, elements=sum(map(len, own)))
        for number, (mine, other) in enumerate(zip(own, seen.groups, strict=False)):
            for key in sorted(set(mine) & set(other), key=lambda key: (key != "lr", key)):
                # Derived: a setting sent to other ranks in float32 is rounded once.
                if not math.isclose(mine[key], other[key], rel_tol=unit_roundoff("float32")):
                    tally.fail(
                        f"step {seen.step}: {key} of group {number} is {mine[key]:.9g}, but "
                        f"{other[key]:.9g} in a single process",
                        parameter=f"param_groups[{number}]/{key}", rank=0, step=seen.step,
                        actual=mine[key], expected=other[key],
                    )  # fmt: skip
    return tally.result()


def parameters(job: JobRecording, reference: Reference) -> CheckResult:
    """Check that the optimizer reaches the recorded parameters from the recorded gradients."""
    tally = Tally("parameters", NO_LAYER)
    for seen in reference.replayed.steps:
        found, before = reference.tensors(seen.step), job.tensors(0, seen.step)
        for name in job.parameters(seen.step):
            rank = job.holders(seen.step, name)[0]
            own = job.tensors(rank, seen.step)
            actual, expected = own.get(f"after/{name}"), found.get(f"after/{name}")
            if actual is None or expected is None or not actual.is_floating_point():
                continue
            if torch.equal(actual, expected):
                same = Comparison(actual.numel())
                tally.add(same, parameter=name, rank=rank, step=seen.step)
                continue
            start = before[f"before/{name}"].double()
            # Derived: an update of some ten operations (AdamW has eleven), each rounded, in
            # whichever order a kernel with more threads has them.
            room = gamma(16, unit_roundoff(actual.dtype))
            size = torch.maximum(start.abs(), expected.double().abs())
            bound = size * room + (expected.double() - start).abs() * room
            tally.add(compare_within(actual, expected.double(), bound + 2.0**-126),
                      parameter=name, rank=rank, step=seen.step)  # fmt: skip
    return tally.result()
