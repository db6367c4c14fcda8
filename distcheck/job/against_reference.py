"""Causes that a comparison with the reference carries, each with its evidence."""

from collections.abc import Iterator, Sequence

from distcheck.job.accepting import is_rate
from distcheck.job.checks.folded import CHECK, Folded, expected_factor, folded_steps, usual
from distcheck.job.checks.ranks import begin_apart
from distcheck.job.checks.reference import clips_beside, reached
from distcheck.job.fitting import Gradients, fit, of_rank
from distcheck.job.replaying import Reference
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult, Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.layers import IN_FLOAT32, ROUNDING

# Chosen: as in `causes`, a factor is named where it leaves a thousandth of the gradient; one that
# is nearer to 1 than that, where it leaves a tenth of what it changes.
_LEFT, _SHARE = 1e-3, 0.1


def explain(
    job: JobRecording, reference: Reference, results: Sequence[CheckResult]
) -> Iterator[Diagnosis]:
    """What the failed checks with the reference mean, where those without it passed."""
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    rates = failed.get(("learning rate", IN_FLOAT32))
    if rates is not None and ("learning rate", "-") not in failed:
        yield _of_rates(job, rates)
    exchanged = ("gradients", ROUNDING) not in failed and ("loss scale", "-") not in failed
    # What ranks compute once their parameters have parted follows from that.
    start, later = failed.get(("initial state", "-")), failed.get(("agreement", "-"))
    from_step = job.steps[0] if start is not None else None
    if start is None and later is not None:
        from_step = _step(later) + (0 if begin_apart(job, _step(later)) else 1)
    wrong = failed.get(("gradients", IN_FLOAT32))
    follows = from_step is not None and wrong is not None and _step(wrong) >= from_step
    if wrong is not None and wrong.first is not None and exchanged and not follows:
        yield from filter(None, [_of_factor(job, reference, wrong.first.step)])
    loss = failed.get(("loss", IN_FLOAT32))
    if loss is not None and wrong is None and exchanged and from_step is None:
        at = _step(loss)
        yield from filter(None, [_of_losses(job, at) or _one_factor(job, reference, at)])
    clipped = failed.get(("clipped gradients", IN_FLOAT32))
    # The first of them is the cause: ranks part after a step, and compute others in the next.
    comes_first = clipped is not None and (
        (wrong is None or _step(clipped) < _step(wrong))
        and (from_step is None or _step(clipped) < from_step)
    )
    if clipped and comes_first and exchanged and ("clipping", ROUNDING) not in failed:
        yield _of_clipping(job, reference, clipped)
    folded = failed.get((CHECK, IN_FLOAT32))
    if folded is not None and exchanged:
        at = _step(folded)
        yield clipped_between(job, at) or _of_accumulation(job, [*folded_steps(job, reference)], at)
    updated = failed.get(("parameters", "-"))
    # What ranks step to, each for itself or one for all, follows from what they were given.
    own = (("learning rate", "-"), ("gradients", ROUNDING), ("clipping", ROUNDING))
    parted = [failed[one] for one in (*own, ("agreement", "-")) if one in failed]
    if updated is not None and all(_step(updated) < _step(one) for one in parted):
        yield name_cause(
            "wrong-update",
            f"step {_step(updated)}: from the same gradients, settings and parameters the "
            "optimizer of one process steps elsewhere",
            "job",
        )


def _step(result: CheckResult) -> int:
    return result.first.step if result.first is not None else 0


def _of_clipping(job: JobRecording, reference: Reference, result: CheckResult) -> Diagnosis:
    """What was done to gradients between the exchange and the step."""
    step, rank = _step(result), result.first.rank if result.first is not None else 0
    seen = next(one for one in reference.replayed.steps if one.step == step)
    for (own_most, own_norm), (most, norm) in clips_beside(job.records[rank, step], seen):
        if abs(own_most - most) > _LEFT * most:
            return name_cause(
                "clip-norm-differs",
                f"step {step}: clipping allows a norm of {own_most:.6g}, and {most:.6g} as one "
                "process",
            )
        if abs(own_norm - norm) > _LEFT * norm:
            return name_cause(
                "clip-by-local-norm",
                f"step {step}: clipping finds a norm of {own_norm:.6g} on rank {rank}, and "
                f"{norm:.6g} as one process",
            )
    name = result.first.parameter if result.first is not None else "a parameter"
    return name_cause(
        "changed-before-step",
        f"step {step}: the gradient of {name} is that of one process after the exchange, and "
        f"another one when rank {rank} steps",
    )


def clipped_between(job: JobRecording, step: int) -> Diagnosis | None:
    """Gradients of one pass that were clipped before those of the next were added to them."""
    record = job.records[0, step]
    early = [clip.passes for clip in record.clips if 0 < clip.passes < len(record.passes)]
    if not early:
        return None
    return name_cause(
        "clip-in-accumulation",
        f"step {step}: gradients were clipped after {early[0]} of {len(record.passes)} backward "
        "passes, and added to afterwards",
    )


def _of_accumulation(job: JobRecording, steps: list[Folded], at: int) -> Diagnosis:
    """Why accumulated gradients are not those of one batch, on one process as well."""
    common = usual(steps)
    one = next(step for step in steps if step.step == at)
    said = (
        f"step {at}: as one process, over {one.passes} backward passes, gradients are "
        f"{one.factor:.6g} times those of one batch with the same samples"
    )
    if expected_factor(one, common) is not None and one.passes != common.passes:
        return name_cause(
            "uneven-accumulation",
            f"{said}, and {common.factor:.6g} times at step {common.step}, which has "
            f"{common.passes} passes",
        )
    if expected_factor(one, common) is not None:
        return name_cause("scaled-twice" if one.factor < 1 else "accumulation-not-scaled", said)
    counts = _unlike_counts(job, at)
    if counts:
        return name_cause(
            "unweighted-tokens",
            f"step {at}: the mean losses of the backward passes count alike, over "
            f"{_listed(counts)} targets; {one.left:.2g} of the gradients' norm is not that of one "
            "batch",
            "passes",
        )
    return name_cause(
        "unexplained",
        f"step {at}: as one process, over {one.passes} backward passes, gradients differ from "
        f"those of one batch by more than a factor ({one.left:.2g} of their norm is left)",
        "job-passes",
    )


def _unlike_counts(job: JobRecording, step: int) -> list[int]:
    """Over how many targets one of the losses went in each pass, where these numbers differ."""
    passes = [one for record in job.at(step) for one in record.trained]
    for call in range(max(len(one.losses) for one in passes)):
        counts = [one.losses[call].counted for one in passes if call < len(one.losses)]
        if len(set(counts)) > 1:
            return counts
    return []


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _of_rates(job: JobRecording, result: CheckResult) -> Diagnosis:
    first = result.first
    assert first is not None
    at_once = first.step == job.steps[0]
    by = float(first.actual) / float(first.expected) if float(first.expected or 0.0) else 0.0
    said = result.reason.partition("; ")[0]
    if not is_rate(first.parameter):
        return name_cause("settings-differ", said, "of-world")
    if at_once:
        evidence = f"{said}: {by:.6g} times as much, with {job.world} ranks"
        return name_cause("learning-rate-differs", evidence, "of-world")
    return name_cause("scheduler-steps-per-rank", f"{said}; steps before that have the same")


def _of_factor(job: JobRecording, reference: Reference, step: int) -> Diagnosis | None:
    """What makes the gradients of one process the job's: a factor, or other weights of ranks."""
    found = reached(reference.tensors(step), Kind.EXCHANGED)
    fitted = fit(of_rank(job, Kind.EXCHANGED, 0, step), found)
    if fitted is None:
        return None
    return (
        _one_factor(job, reference, step)
        or _of_weights(job, found, step)
        or name_cause(
            "unexplained",
            f"step {step}: gradients are the mean of the ranks', and differ from those of one "
            f"process with the same samples by more than a factor ({fitted[1]:.2g} of their norm "
            "is left)",
            "job-weights",
        )
    )


def _one_factor(job: JobRecording, reference: Reference, step: int) -> Diagnosis | None:
    """The gradients of one process times a factor."""
    fitted = fit(
        of_rank(job, Kind.EXCHANGED, 0, step), reached(reference.tensors(step), Kind.EXCHANGED)
    )
    if fitted is None or fitted[1] > min(_LEFT, _SHARE * abs(fitted[0][0] - 1)):
        return None
    passes = max(1, len(job.records[0, step].trained))
    return _named(fitted[0][0], step, world=job.world, passes=passes)


def _of_weights(job: JobRecording, found: Gradients, step: int) -> Diagnosis | None:
    """Ranks that count alike and should not: one process weighs them otherwise."""
    fitted = fit(
        found, *(of_rank(job, Kind.LOCAL_GRADIENT, rank, step) for rank in range(job.world))
    )
    counts = _unlike_counts(job, step)
    if fitted is not None:  # what is left must be little beside what the weights explain
        unlike = max(abs(one * job.world - 1) for one in fitted[0])
        fitted = fitted if fitted[1] <= min(_LEFT, _SHARE * unlike) else None
    if fitted is not None and abs(sum(fitted[0]) - 1) <= _LEFT:
        rows = [sum(len(one.rows) for one in record.trained) for record in job.at(step)]
        shares = [number / (sum(rows) or 1) for number in rows]
        by_rows = all(abs(a - b) <= _LEFT for a, b in zip(shares, fitted[0], strict=True))
        said = ", ".join(f"{one:.4g}" for one in fitted[0])
        return name_cause(
            "unweighted-mean" if by_rows else "unweighted-tokens",
            f"step {step}: the ranks' gradients count alike, and one process weighs them by {said}"
            + (f", as their samples {_listed(rows)}" if by_rows else ""),
            "job-counts",
        )
    if fitted is not None and all(one > _LEFT for one in fitted[0]):
        times = ", ".join(f"{1 / (job.world * one):.4g}" for one in fitted[0])
        evidence = f"step {step}: the ranks' gradients are {times} times those of one process"
        return name_cause("wrong-divisor", evidence, "job-by-rank")
    named = _of_losses(job, step)
    if counts and named is None:
        evidence = f"step {step}: mean losses over {_listed(counts)} targets count alike"
        return name_cause("unweighted-tokens", evidence, "job-step")
    return named


def _of_losses(job: JobRecording, step: int) -> Diagnosis | None:
    """A rank whose loss counts nothing, or adds up other terms than rank 0's."""
    records = job.at(step)
    local = [of_rank(job, Kind.LOCAL_GRADIENT, rank, step).values() for rank in range(job.world)]
    zero = [r for r, own in enumerate(local) if not any(g is not None and g.any() for g in own)]
    heard = [[call.counted for one in records[r].trained for call in one.losses] for r in zero]
    if 0 < len(zero) < job.world and all(not counts or any(counts) for counts in heard):
        return name_cause(
            "dropped-rank",
            f"step {step}: before the exchange all gradients of rank {_listed(zero)} are zero, and "
            "the others' are not",
            "job",
        )
    terms = [
        ", ".join(dict.fromkeys(term.name for one in record.trained for term in one.terms))
        or "what is not a weighted sum of losses"
        for record in records
    ]
    other = next((rank for rank, one in enumerate(terms) if one != terms[0]), 0)
    if not other:
        return None
    return name_cause(
        "loss-differs",
        f"step {step}: the loss of rank {other} adds up {terms[other]}, and that of rank 0 "
        f"{terms[0]}",
    )


def _named(factor: float, step: int, *, world: int, passes: int) -> Diagnosis:
    evidence = f"step {step}: gradients are {factor:.9g} times those of one process"

    def close(other: float) -> bool:
        return abs(factor - other) <= _LEFT * other

    if close(world):
        also = " (or the number of accumulated passes)" if passes == world else ""
        evidence += f": the number of ranks{also}"
        return name_cause("missing-division", evidence, "job", world=world)
    if close(1 / world):
        evidence += ": one over the number of ranks, beside the mean of the exchange"
        return name_cause("double-division", evidence, "job")
    return name_cause("wrong-divisor", evidence, "job")
