"""Causes that a comparison with the reference carries, each with its evidence."""

from collections.abc import Iterator, Sequence

from distcheck.job.checks.exchange import divisors
from distcheck.job.checks.folded import CHECK, Folded, expected_factor, folded_steps, usual
from distcheck.job.reading import Recording
from distcheck.job.replaying import Reference
from distcheck.records import CheckResult, Diagnosis
from distcheck.records.layers import IN_FLOAT32, ROUNDING

# Chosen: as in `causes`, a factor is named where it leaves a thousandth of the gradient; one that
# is nearer to 1 than that, where it leaves a tenth of what it changes.
_LEFT, _SHARE = 1e-3, 0.1


def explain(
    job: Recording, reference: Reference, results: Sequence[CheckResult]
) -> Iterator[Diagnosis]:
    """What the failed checks with the reference mean, where those without it passed."""
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    rates = failed.get(("learning rate", IN_FLOAT32))
    if rates is not None and ("learning rate", "-") not in failed:
        yield _of_rates(job, rates)
    exchanged = ("gradients", ROUNDING) not in failed and ("loss scale", "-") not in failed
    # What ranks compute once their parameters have parted follows from that.
    start, later = failed.get(("initial state", "-")), failed.get(("agreement", "-"))
    from_step = job.steps[0] if start is not None else _step(later) + 1 if later else None
    wrong = failed.get(("gradients", IN_FLOAT32))
    follows = from_step is not None and wrong is not None and _step(wrong) >= from_step
    if wrong is not None and wrong.first is not None and exchanged and not follows:
        yield from _of_factor(job, reference, wrong.first.step)
    clipped = failed.get(("clipped gradients", IN_FLOAT32))
    alone = wrong is None and from_step is None and exchanged
    if clipped is not None and alone and ("clipping", ROUNDING) not in failed:
        yield Diagnosis(
            cause="clip-by-local-norm",
            evidence=f"step {_step(clipped)}: gradients before clipping are those of one process, "
            "and those after it are not",
            suggestion="clip by the norm of the exchanged gradients, once, after the exchange",
        )
    folded = failed.get((CHECK, IN_FLOAT32))
    if folded is not None and exchanged:
        yield _of_accumulation(job, [*folded_steps(job, reference)], _step(folded))
    updated = failed.get(("parameters", "-"))
    # What ranks step to, each for itself or one for all, follows from what they were given.
    own = (("learning rate", "-"), ("gradients", ROUNDING), ("clipping", ROUNDING))
    parted = [failed[one] for one in (*own, ("agreement", "-")) if one in failed]
    if updated is not None and all(_step(updated) < _step(one) for one in parted):
        yield Diagnosis(
            cause="wrong-update",
            evidence=f"step {_step(updated)}: from the same gradients, settings and parameters the "
            "optimizer of one process steps elsewhere",
            suggestion="look at what the script does to parameters beside optimizer.step()",
        )


def _step(result: CheckResult) -> int:
    return result.first.step if result.first is not None else 0


def _of_accumulation(job: Recording, steps: list[Folded], at: int) -> Diagnosis:
    """Why accumulated gradients are not those of one batch, on one process as well."""
    common = usual(steps)
    one = next(step for step in steps if step.step == at)
    said = (
        f"step {at}: as one process, over {one.passes} backward passes, gradients are "
        f"{one.factor:.6g} times those of one batch with the same samples"
    )
    if expected_factor(one, common) is not None and one.passes != common.passes:
        return Diagnosis(
            cause="uneven-accumulation",
            evidence=f"{said}, and {common.factor:.6g} times at step {common.step}, which has "
            f"{common.passes} passes",
            suggestion="step after the last of the accumulated passes, (i + 1) % accumulate == 0, "
            "and divide what an epoch has left by its own number of passes",
        )
    if expected_factor(one, common) is not None:
        twice = one.factor < 1
        return Diagnosis(
            cause="scaled-twice" if twice else "accumulation-not-scaled",
            evidence=said,
            suggestion=f"divide the loss of every pass by {one.passes}, once",
        )
    counts = _unlike_counts(job, at)
    if counts:
        return Diagnosis(
            cause="unweighted-tokens",
            evidence=f"step {at}: the mean losses of the backward passes count alike, over "
            f"{_listed(counts)} targets; {one.left:.2g} of the gradients' norm is not that of one "
            "batch",
            suggestion="divide each pass's summed loss by the number of targets of the whole step",
        )
    return Diagnosis(
        cause="unexplained",
        evidence=f"step {at}: as one process, over {one.passes} backward passes, gradients differ "
        f"from those of one batch by more than a factor ({one.left:.2g} of their norm is left)",
        suggestion="look for what makes one backward pass count more than another",
    )


def _unlike_counts(job: Recording, step: int) -> list[int]:
    """Over how many targets one of the losses went in each pass, where these numbers differ."""
    passes = [one for record in job.at(step) for one in record.passes]
    for call in range(max(len(one.losses) for one in passes)):
        counts = [one.losses[call].counted for one in passes if call < len(one.losses)]
        if len(set(counts)) > 1:
            return counts
    return []


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _of_rates(job: Recording, result: CheckResult) -> Diagnosis:
    first = result.first
    assert first is not None
    at_once = first.step == job.steps[0]
    by = float(first.actual) / float(first.expected) if float(first.expected or 0.0) else 0.0
    said = result.reason.partition("; ")[0]
    if at_once:
        return Diagnosis(
            cause="learning-rate-differs",
            evidence=f"{said}: {by:.6g} times as much, with {job.world} ranks",
            suggestion="do not multiply the learning rate by the number of ranks. If it is meant "
            "to grow with them, give --accept learning-rate-differs",
        )
    return Diagnosis(
        cause="scheduler-steps-per-rank",
        evidence=f"{said}; steps before that have the same",
        suggestion="step the scheduler once per optimizer step, whatever the number of ranks. If "
        "it is meant to step once per rank, give --accept scheduler-steps-per-rank",
    )


def _of_factor(job: Recording, reference: Reference, step: int) -> Iterator[Diagnosis]:
    """The gradients are a multiple of the reference's: which one, and what leaves it."""
    found = reference.tensors(step)
    product = square = total = 0.0
    pairs = []
    for name in job.parameters(step):
        raw, expected = job.gradient("raw", 0, step, name), found.get(f"raw/{name}")
        if raw is None or expected is None or raw.shape != expected.shape:
            continue
        pairs.append((raw.double(), expected.double()))
        product += float((raw.double() * expected.double()).sum())
        square += float(expected.double().square().sum())
        total += float(raw.double().square().sum())
    if not square or not total:
        return
    factor = product / square
    left = (sum(float((r - factor * e).square().sum()) for r, e in pairs) / total) ** 0.5
    counts = divisors(job, step)
    is_uneven = counts is not None and max(counts) - min(counts) > _LEFT * max(counts)
    if counts is not None and is_uneven:
        yield Diagnosis(
            cause="unweighted-tokens",
            evidence=f"step {step}: each rank divides its summed loss by a number of its own "
            f"({', '.join(f'{one:.6g}' for one in counts)}), and the ranks then count alike",
            suggestion="divide each rank's summed loss by the mean number of targets per rank, "
            "which takes an all-reduce of the counts",
        )
        return
    if left > min(_LEFT, _SHARE * abs(factor - 1)):
        yield Diagnosis(
            cause="unexplained",
            evidence=f"step {step}: gradients are the mean of the ranks', and differ from those of "
            f"one process with the same samples by more than a factor ({left:.2g} of their norm is "
            "left)",
            suggestion="look for what the script computes from its rank or from the world: "
            "weights of samples, masks, padding",
        )
        return
    passes = max(1, sum(one.loss is not None for one in job.records[0, step].passes))
    yield _named(factor, step, world=job.world, passes=passes)


def _named(factor: float, step: int, *, world: int, passes: int) -> Diagnosis:
    evidence = f"step {step}: gradients are {factor:.9g} times those of one process"

    def close(other: float) -> bool:
        return abs(factor - other) <= _LEFT * other

    if close(world):
        also = " (or the number of accumulated passes)" if passes == world else ""
        return Diagnosis(
            cause="missing-division",
            evidence=f"{evidence}: the number of ranks{also}",
            suggestion=f"divide the sum over the ranks by {world}, or do not multiply the loss",
        )
    if close(1 / world):
        return Diagnosis(
            cause="double-division",
            evidence=f"{evidence}: one over the number of ranks, beside the mean of the exchange",
            suggestion="do not divide the loss by the number of ranks: the exchange has the mean",
        )
    return Diagnosis(
        cause="wrong-divisor",
        evidence=evidence,
        suggestion="look for a factor of the loss that depends on the rank or on the world",
    )
