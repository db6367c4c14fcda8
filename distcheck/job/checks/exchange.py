"""Checks that reduced gradients are the mean of the local gradients; checks clipping and the scale
of the loss.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain

import msgspec
import torch

from distcheck.job.checks import terms
from distcheck.job.fitting import fit, gradients_of_rank
from distcheck.job.inside import state
from distcheck.job.inside.moved_gradients import fate_of_cleared
from distcheck.job.step_view import JobStep
from distcheck.judge.checks.comparison import Comparison, compare_within
from distcheck.judge.checks.tally import Tally
from distcheck.judge.diagnosis.measurements import SAME_FACTOR
from distcheck.machine.numerics import NotBoundedError, gamma, unit_roundoff
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import StepRecord
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult, FindingKind
from distcheck.records.layers import NO_LAYER, ROUNDING
from distcheck.records.ledger import FSDP, Ledger

NOT_TRAINED = (
    "no parameter had a gradient at any optimizer step: the optimizer trains nothing, unless it "
    "keeps gradients elsewhere"
)
# Heuristic: relative distance of equal factors for a loss in a 16-bit dtype. In float32, quotients
# of losses round to 1e-7 (SAME_FACTOR); meaningful factors differ from 1 by a half.
_AUTOCAST = 1e-2


def token_weights(job: JobRecording, step: int) -> list[float]:
    """Return the weight of each rank's mean loss.

    If every rank has one backward pass and its loss is only a mean over targets, weights are
    proportional to the numbers of targets. Otherwise all ranks are weighted equally.
    """
    equal = [1 / job.world] * job.world
    counts, factors = [], []
    for record in job.at(step):
        passes = record.trained
        if len(passes) != 1 or len(passes[0].losses) != 1:
            return equal
        call = passes[0].losses[0]
        if call.reduction != "mean" or call.counted == 0 or not call.value:
            return equal
        counts.append(call.counted)
        factors.append((passes[0].loss or 0.0) / call.value / (record.scale or 1.0))
    room = _AUTOCAST if any(p.autocast for r in job.at(step) for p in r.passes) else SAME_FACTOR
    if max(factors) - min(factors) > room * max(map(abs, factors)):
        return equal  # the loss has other terms
    return [count / sum(counts) for count in counts] if len(set(counts)) > 1 else equal


def _is_trained(job: JobRecording, steps: Sequence[int]) -> bool:
    """Return True if any optimizer received a gradient."""
    digests = (record.digests for step in steps for record in job.at(step))
    return any(name.startswith("step/") for one in digests for name in one)


def gradients(job: JobRecording, steps: Sequence[int]) -> CheckResult:
    """Check that reduced gradients are the mean (or the sum) of the ranks' local gradients, within
    rounding in any summation order.
    """
    tally = Tally("gradients", ROUNDING)
    nothing, sums = True, 0
    for step in steps:
        if any(record.skipped for record in job.at(step)):
            continue  # gradients are not finite
        view = gradients_at_step(job, step)
        if view.factor != 1.0:
            tally.remark("gradients are divided by the number of backward passes after the last")
        for index in range(len(view.specs)):
            nothing = nothing and not any(
                bool(view.local(rank, index).any()) for rank in range(job.world)
            )
            sums += _compare(view, tally, index)
    result = tally.result()
    if not result.compared.elements:
        is_trained = _is_trained(job, steps)
        tally.missing(
            "no local gradient was recorded" if is_trained else NOT_TRAINED,
            FindingKind.NO_LOCAL if is_trained else FindingKind.OTHER,
        )
    elif nothing:
        tally.missing("every gradient is exactly zero, so nothing can be compared")
    elif sums:
        tally.remark(
            "gradients are the sum of the ranks' gradients, which is right if the loss is divided "
            "by the world size"
        )
    return tally.result()


def gradients_at_step(
    job: JobRecording, step: int, kind: Kind = Kind.EXCHANGED, *, of_all: bool = False
) -> JobStep:
    """Return the gradients of a step.

    With `of_all`, parameters are omitted that the optimizer of some rank does not have. For
    optimizer gradients, clipping by norm is taken into account.
    """
    shares, later = token_weights(job, step), scale_after_last_pass(job, step)
    counted = len(set(shares)) > 1
    targets = [one.trained[0].losses[0].counted for one in job.at(step)] if counted else []
    names = [
        name
        for name in job.parameters(step)
        if not of_all or len(job.holders(step, name)) == job.world
    ]
    clips = {name: _clipped_by(job.records[0, step], name) for name in names}
    clips = {name: by for name, by in clips.items() if kind is Kind.GRADIENT and by[0] != 1.0}
    return JobStep(job, step, kind, names, shares, factor=later, clips=clips, targets=targets)


def _compare(view: JobStep, tally: Tally, index: int) -> int:
    """Compare one parameter on every rank; return the number of ranks that hold a sum."""
    job, step, name = view.job, view.step, view.specs[index].name
    records, sums = job.at(step), 0
    try:
        found = view.interval(index)
    except NotBoundedError as error:
        tally.missing(f"{name}: {error}")
        return 0
    held = [view.reduced(rank, index) for rank in range(job.world)]
    known: dict[str, Comparison] = {}  # by digest: most ranks hold the same bits
    for rank, record in enumerate(records):
        raw = held[rank]
        if not job.holds(rank, step, name):
            continue
        if raw is None and all(one is None for one in held):
            continue  # dropped on all ranks
        if raw is None:
            tally.fail(f"step {step}: rank {rank} has no gradient of {name}",
                       parameter=name, rank=rank, step=step)  # fmt: skip
            continue
        of = f"{record.whole} {record.digests[f'raw/{name}']}"
        known[of] = one = known.get(of) or compare_within(raw, found.mean, found.bound)
        if not one.ok and job.world > 1:
            total = compare_within(raw, found.mean * job.world, found.bound * job.world)
            if total.ok:
                one, sums = total, sums + 1
        tally.add(one, parameter=name, rank=rank, step=step)
    return sums


def redundant_synchronization(job: JobRecording) -> tuple[int, int, float | None]:
    """Measure redundant synchronization: backward passes of rank 0 in which DistributedDataParallel
    synchronizes, although it does so again in a later pass of the same step.

    Returns the number of these passes, the gradient bytes of one synchronization, and the seconds
    by which one delayed backward (None if torch did not measure them).
    """
    count = size = 0
    waited: float | None = None
    for step in job.steps:
        record = job.records[0, step]
        flags = [one.exchanges for one in record.trained]
        if not flags or not flags[-1] or not record.whole:
            continue
        waited = next((p.exchange_s for p in record.passes[::-1] if p.exchange_s), waited)
        count += sum(flag is True for flag in flags[:-1])
        kept = [job.gradient(Kind.LOCAL_GRADIENT, 0, step, name) for name in job.parameters(step)]
        size = sum(g.numel() * g.element_size() for g in kept if g is not None)
    return count, size, waited


def each_pass_reduces(ledger: Ledger | None, job: JobRecording) -> str:
    """Return a note if FSDP reduces all gradients in each of several micro-batches; else ""."""
    record = None if ledger is None else job.records.get((0, ledger.step))
    if ledger is None or record is None or len(record.trained) < 2 or not ledger.gradients:
        return ""
    rows = [row for row in ledger.rows if row.library == FSDP and "scatter" in row.operation]
    if sum(row.elements for row in rows) < len(record.trained) * ledger.gradients:
        return ""
    return (
        f"FSDP reduces all gradients in each of the {len(record.trained)} backward passes of a "
        "step: correct, and needs less memory than set_requires_gradient_sync(False) (or "
        "no_sync()) in all passes but the last, which communicates less"
    )


def clipping(job: JobRecording, steps: Sequence[int]) -> CheckResult | None:
    """Check that clipping by norm multiplies the reduced gradients by the factor that follows from
    their norm.
    """
    if not any(clip.kind == "norm" for record in job.records.values() for clip in record.clips):
        return None
    tally = Tally("clipping", ROUNDING)
    for step in steps:
        for rank, record in enumerate(job.at(step)):
            if record.skipped or any(clip.kind != "norm" for clip in record.clips):
                continue
            for name in job.parameters(step):
                raw = job.gradient(Kind.EXCHANGED, rank, step, name)
                clipped = job.gradient(Kind.GRADIENT, rank, step, name)
                if raw is not None and clipped is not None and record.whole:
                    tally.add(
                        _compare_product(clipped, raw, *_clipped_by(record, name)),
                        parameter=name, rank=rank, step=step,
                    )  # fmt: skip
    return tally.result()


def _clipped_by(record: StepRecord, name: str) -> tuple[float, int]:
    """Return the factor by which clipping by norm scales a parameter's gradient, and its number of
    roundings.
    """
    clips = [one for one in record.clips if not one.names or name in one.names]
    factor = 1.0
    for clip in clips:
        if clip.most is not None and clip.norm is not None:
            factor *= min(1.0, clip.most / (clip.norm + 1e-6))  # Derived: torch's own formula
    return factor, 2 * len(clips) + 4


def _compare_product(
    clipped: torch.Tensor, raw: torch.Tensor, factor: float, roundings: int
) -> Comparison:
    """Compare with `raw * factor`: torch rounds the factor three times, and the product once."""
    expected = raw.double() * factor
    bound = expected.abs() * gamma(roundings, unit_roundoff(raw.dtype)) + 2.0**-126
    return compare_within(clipped, expected, bound)


def loss_factors(job: JobRecording, step: int) -> list[float] | None:
    """Return, for each rank, the ratio of the backward losses to torch's mean losses, summed over
    the passes of a step; None if a loss is not a multiple of one mean loss.
    """
    found = []
    for record in job.at(step):
        passes = record.trained
        total, factors = 0.0, set[float]()
        for one in passes:
            if len(one.losses) != 1 or one.losses[0].reduction != "mean" or not one.losses[0].value:
                return None
            assert one.loss is not None
            factor = one.loss / one.losses[0].value / (record.scale or 1.0)
            factors.add(factor)
            total += factor
        room = _AUTOCAST if any(one.autocast for one in passes) else SAME_FACTOR
        if not passes or max(factors) - min(factors) > room * max(map(abs, factors)):
            return None
        found.append(total)
    return found


def factors_of_sum_losses(job: JobRecording, step: int) -> list[float] | None:
    """Return the factors of `loss_factors` for losses that are sums over targets: the sum of a
    rank's losses, averaged over ranks, relative to the mean over all targets. It is the same for
    all ranks. None for other losses.
    """
    total = sums = 0.0
    targets = 0
    for record in job.at(step):
        for one in record.trained:
            if len(one.losses) != 1 or one.losses[0].reduction != "sum":
                return None
            total += (one.loss or 0.0) / (record.scale or 1.0) / job.world
            sums += one.losses[0].value
            targets += one.losses[0].counted
    return [total * targets / sums] * job.world if sums and targets else None


def scale_after_last_pass(job: JobRecording, step: int) -> float:
    """Return the factor by which a script scales gradients after the last pass: 1 / (number of
    passes) if its losses are not scaled, and 1 otherwise or if this is unknown.
    """
    factors = _loss_weights(job, step)
    passes = len(job.records[0, step].trained)
    if passes < 2 or factors is None:
        return 1.0
    # A pipeline schedule divides, whatever the divisor of the loss.
    staged = any(axis.kind == "pipeline" for axis in job.ranks[0].axes)
    if not staged and any(abs(f / passes - 1) > SAME_FACTOR for f in factors):
        return 1.0
    local = [gradients_of_rank(job, Kind.LOCAL_GRADIENT, rank, step) for rank in range(job.world)]
    parts = [{n: g for n, g in one.items() if g is not None} for one in local]
    record, own = job.records[0, step], state.mean(parts, [1 / job.world] * job.world) or {}
    given = {
        name: None if one is None else one.double() / (_clipped_by(record, name)[0] or 1.0)
        for name, one in gradients_of_rank(job, Kind.GRADIENT, 0, step).items()
    }
    for fitted in (fit(gradients_of_rank(job, Kind.EXCHANGED, 0, step), own), fit(given, own)):
        if fitted is not None and abs(fitted[0][0] * passes - 1) <= SAME_FACTOR:
            return 1 / passes
    return 1.0


def _loss_weights(job: JobRecording, step: int) -> list[float] | None:
    """Return, for each rank, the weight of the mean loss summed over the passes of a step; None if
    the loss has terms with different weights, or is unknown.
    """
    factors = loss_factors(job, step) or factors_of_sum_losses(job, step)
    if factors is not None:
        return factors
    found = [terms.judge_loss_weight(job, rank, step) for rank in range(job.world)]
    return None if any(one.why or one.alone for one in found) else [one.times for one in found]


def carried(job: JobRecording) -> CheckResult:
    """Check that the gradients of a step are cleared before those of the next step reach the
    optimizer.
    """
    tally = Tally("accumulation", NO_LAYER)
    for step in job.steps:
        for rank, record in enumerate(job.at(step)):
            tally.count(parameter="gradients", rank=rank, step=step, elements=1)
            if record.carried:
                tally.fail(
                    f"step {step}: the gradients passed to the optimizer still include those of "
                    "its last step", parameter="gradients", rank=rank, step=step,
                )  # fmt: skip
    return tally.result()


def loss_scale(job: JobRecording, steps: Sequence[int]) -> CheckResult | None:
    """Check that an accumulated loss is divided by the number of backward passes exactly once.

    If the passes of a step belong to several losses, each loss is judged separately.
    """
    tally, views = Tally("loss scale", NO_LAYER), _views_by_loss(job)
    ranks = range(job.world)
    steps = [s for s in steps if all(max(_lengths(job, r, s), default=0) > 1 for r in ranks)]
    for step in steps:
        counts = {len(job.by_loss(rank, step)) for rank in ranks}
        if len(counts) > 1 or any(len(_lengths(job, rank, step)) > 1 for rank in ranks):
            tally.remark(
                "the scale of the loss is not judged, since the backward passes of a step are of "
                "several losses, and not equally many of each"
            )
            continue
        losses = counts.pop()
        for view in views[:losses]:
            _judge_scale(view, tally, step, losses)
    return tally.result() if steps else None


def _lengths(job: JobRecording, rank: int, step: int) -> set[int]:
    """Return the numbers of passes of each loss."""
    return {len(one) for one in job.by_loss(rank, step)}


def _views_by_loss(job: JobRecording) -> list[JobRecording]:
    """Return one recording for each loss of a step, which has only the passes of that loss."""
    found = {place: job.by_loss(*place) for place in job.records}
    return [
        dataclasses.replace(
            job,
            records={
                place: msgspec.structs.replace(
                    record, passes=tuple(chain(*found[place][n : n + 1]))
                )
                for place, record in job.records.items()
            },
        )
        for n in range(max(map(len, found.values()), default=0))
    ]


def _judge_scale(job: JobRecording, tally: Tally, step: int, losses: int) -> None:
    factors = _loss_weights(job, step)
    if factors is None:
        _judge_terms(job, tally, step)
        return
    later = scale_after_last_pass(job, step)
    for rank, factor in enumerate(factors):
        total = factor * later
        passes = _count(job, rank, step)
        tally.count(parameter="factor of the loss", rank=rank, step=step, elements=passes)
        for wrong in (float(passes), 1 / passes):
            if passes < 2 or abs(total - wrong) > SAME_FACTOR * wrong or wrong * losses == 1:
                continue  # a right scale, or the mean of several losses
            if fate_of_cleared(job, step) == "unclear":
                tally.missing(
                    f"step {step}: gradients were cleared between backward passes, and the "
                    "optimizer gradients are a multiple of the ranks' mean neither with nor "
                    "without them, so the script may have kept them elsewhere"
                )
            elif terms.may_be_intended_weight(job, rank, step, wrong):
                tally.missing(
                    f"over {passes} backward passes gradients are {total:.6g}x those of the "
                    f"mean loss: either because of the weight {wrong:.6g} in the loss, or "
                    "because of the number of passes; change the weight for this run to "
                    "check the scale"
                )
            else:
                division, size = (
                    ("not divided", "too large") if wrong > 1
                    else ("divided twice", "the right size")
                )  # fmt: skip
                tally.fail(
                    f"step {step}: the loss is {division} by the {passes} gradient "
                    f"accumulation steps, so gradients are {total:.6g}x {size}",
                    parameter="factor of the loss", rank=rank, step=step, actual=total,
                    expected=1.0,
                )  # fmt: skip


def _judge_terms(job: JobRecording, tally: Tally, step: int) -> None:
    """Report the loss terms that are scaled differently, or why this is unknown."""
    for rank in range(job.world):
        found, passes = terms.judge_loss_weight(job, rank, step), _count(job, rank, step)
        if not found.alone or passes < 2:
            tally.remark(f"the scale of the loss is not judged, since {found.why}")
            return
        tally.count(parameter="factor of the loss", rank=rank, step=step, elements=passes)
        tally.fail(
            f"step {step}: {found.others[0]} is divided by the {passes} gradient accumulation "
            f"steps, but {found.alone[0]} is not",
            parameter="factor of the loss", rank=rank, step=step, actual=float(passes),
            expected=1.0,
        )  # fmt: skip


def _count(job: JobRecording, rank: int, step: int) -> int:
    """Return the number of passes with a loss, including passes whose gradients were dropped."""
    return sum(one.loss is not None for one in job.records[rank, step].passes)
