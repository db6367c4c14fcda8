"""Diagnosis of a job: maps failed checks to causes, each with its evidence and one suggestion."""

from collections.abc import Iterator, Sequence
from math import isclose

import msgspec

from distcheck.job import layouts
from distcheck.job.accepting import is_rate
from distcheck.job.checks import averaging, exchange, terms
from distcheck.job.checks.accumulation import (
    CHECK,
    MergedStep,
    expected_factor,
    first_most_common_step,
    merged_steps,
)
from distcheck.job.checks.ranks import (
    averaged_parameters,
    first_different_start,
    first_divergence_before,
    first_rank_local_write,
)
from distcheck.job.checks.reference import (
    paired_clips,
    paired_losses,
    reference_gradients,
    reference_scale,
)
from distcheck.job.fitting import Gradients, fit, gradients_of_rank
from distcheck.job.inside.choosing import collective_before_backward
from distcheck.job.inside.moved_gradients import fate_of_cleared
from distcheck.job.replaying import Reference
from distcheck.job.step_view import JobStep
from distcheck.job.term_weights import term_weights
from distcheck.judge.diagnosis.measurements import MOST_EARLIER, SAME_FACTOR
from distcheck.judge.diagnosis.measuring import explain
from distcheck.judge.diagnosis.updates import tensors_in_norm
from distcheck.judge.diagnosis.wording import first_names_text
from distcheck.judge.divergence.noise_floor import norm_of
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import LoaderIteration
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult, Diagnosis, FindingKind
from distcheck.records.causes import joined_suggestions, name_cause
from distcheck.records.layers import IN_FLOAT32, NO_LAYER, ROUNDING

# Heuristic: a factor is named if its residual is below 1e-3 of the gradient and, for factors close
# to 1, below a tenth of the change that it explains.
_LEFT, _SHARE = 1e-3, 0.1
# Causes with separate advice for whole jobs, and for jobs that synchronize with
# DistributedDataParallel.
_IN_JOBS = {"missing-sync", "accumulated-gradient", "low-precision", "noise", "nonfinite"}
_WITH_DDP = {"partial-sync", "double-division", "missing-division"}
Failed = dict[tuple[str, str], CheckResult]


def diagnose(
    job: JobRecording, results: Sequence[CheckResult], reference: Reference | None = None
) -> list[Diagnosis]:
    """Return the causes of the failed checks; empty if none failed."""
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    checks = {check for check, _ in failed}
    if not checks:
        return []
    found = [*_data_causes(job, failed), *_state_causes(failed)]
    if alone := _decisive_causes(job, failed, None if found else reference):
        return alone
    later = failed.get(("agreement", NO_LAYER))
    if later is not None and not checks & {"initial state", "loss scaler"}:
        found += [*_broadcast_causes(job, _step_of(later)), *_outside_writes(job, _step_of(later))]
    step = min(map(_step_of, failed.values()), default=0)
    if ("gradients", ROUNDING) in failed:
        step_at = _step_of(failed["gradients", ROUNDING])
        found += [*_between_passes(job, step_at)] or [*_reduction_causes(job, step_at)]
    elif "clipping" in checks:
        found.append(
            name_cause(
                "clip-by-local-norm",
                f"step {step}: the clipped gradient is not the reduced gradient times the factor "
                "that follows from the norm used for clipping",
            )
        )
    if ("accumulation", NO_LAYER) in failed:
        found += _between_passes(job, _step_of(failed["accumulation", NO_LAYER]))
    if "loss scale" in checks:
        result = _result_of(failed, "loss scale")
        between = _between_passes(job, _step_of(result))
        lost = [one for one in between if one.cause == "lost-micro-batch"]
        found += lost or [_loss_scale_cause(job, result)]
    if ("learning rate", NO_LAYER) in failed:
        found.append(_settings_cause(failed["learning rate", NO_LAYER]))
    if "loss scaler" in checks:
        found.append(_scaler_cause(_result_of(failed, "loss scaler")))
    if reference is not None:
        found += _reference_causes(job, reference, failed)
    return found or [_unexplained(failed, step)]


def _decisive_causes(
    job: JobRecording, failed: Failed, reference: Reference | None
) -> list[Diagnosis]:
    if ("finite", NO_LAYER) in failed:
        return [name_cause("nonfinite", failed["finite", NO_LAYER].reason, "job")]
    if (averaging.CHECK, ROUNDING) in failed:
        return [averaging.explain(job, failed[averaging.CHECK, ROUNDING])]
    if reference is None or reference_weights_ranks(job, reference):
        return []
    return layouts.explain(job, reference, failed)


def _result_of(failed: Failed, check: str) -> CheckResult:
    return next(result for (name, _), result in failed.items() if name == check)


def _step_of(result: CheckResult) -> int:
    return result.first.step if result.first is not None else 0


def _data_causes(job: JobRecording, failed: Failed) -> Iterator[Diagnosis]:
    checks = {check for check, _ in failed}
    if ("data", IN_FLOAT32) in failed:
        yield name_cause("sample-content-differs", failed["data", IN_FLOAT32].first_reason)
    data = _result_of(failed, "data") if "data" in checks else None
    if data is not None and data.first_kind is FindingKind.SAME_RANDOMNESS:
        evidence = f"{data.first_reason}, so their augmentations are identical"
        yield name_cause("shared-rng-seed", evidence, "job-data")
    elif data is not None and data.first_kind is FindingKind.READ_APART:
        yield name_cause("sample-content-differs", data.first_reason, "mesh")
    elif data is not None and ("data", NO_LAYER) in failed:
        same = data.first_kind is FindingKind.SAME_SAMPLES
        cause = "same-data" if same else "overlapping-data"
        variant, about = _sampling(job)
        yield name_cause(cause, data.first_reason + about, variant)
    if "epoch order" in checks:
        yield name_cause("missing-set-epoch", _result_of(failed, "epoch order").first_reason)
    if "random streams" in checks:
        result = _result_of(failed, "random streams")
        evidence = f"{result.first_reason}, so their dropout masks or noise are identical"
        is_noise = result.first_kind is FindingKind.SAME_NOISE
        evidence = result.first_reason if is_noise else evidence
        yield name_cause("shared-rng-seed", evidence, "job-noise" if is_noise else "job")


def _sampling(job: JobRecording) -> tuple[str, str]:
    """Return the variant of the advice for samples that ranks share, and the fact on which it is
    based: a custom batch sampler, or samplers with inconsistent settings.
    """
    if not any(record.batches for record in job.records.values()):
        return "job-draws", ""
    used = {p[:2] for record in job.records.values() for one in record.trained for p in one.batches}
    by_pass: dict[tuple[int, int], dict[int, LoaderIteration]] = {}
    for (rank, _), record in job.records.items():
        for one in record.iterations:
            by_pass.setdefault((one.loader, one.epoch), {})[rank] = one
    for place in sorted(used & by_pass.keys()):
        first = by_pass[place].get(0)
        if first is None:
            continue
        if first.batch_sampler:
            return "job-batch-sampler", f"; {first.batch_sampler} selects the batches"
        own = {**first.settings, "epoch": first.sampler_epoch}
        for rank in sorted(by_pass[place].keys() - {0}):
            one = by_pass[place][rank]
            settings = {**one.settings, "epoch": one.sampler_epoch}
            for key, value in own.items():
                if (settings.get(key) == value) is (key == "rank"):
                    both = f"{value} on rank 0 and {settings.get(key)} on rank {rank}"
                    return "job-sampler-settings", f"; {first.sampler} has the {key} {both}"
    return "job-sampler", ""


def _state_causes(failed: Failed) -> Iterator[Diagnosis]:
    result = failed.get(("initial state", "-"))
    if result is not None and result.first is not None:
        yield name_cause(
            "initial-state-differs",
            f"before the first recorded step {result.first.parameter} of rank "
            f"{result.first.rank} differs from rank 0's",
        )


def _broadcast_causes(job: JobRecording, step: int) -> Iterator[Diagnosis]:
    """Detect sharded optimizers without a broadcast: each parameter changes on one rank only, and
    several ranks own parameters.
    """
    apart, before = first_different_start(job, step), [one for one in job.steps if one < step]
    if apart and before and 0 < len(alone := job.holders(before[-1], apart)) < job.world:
        yield name_cause(
            "missing-broadcast",
            f"step {before[-1]}: only the optimizer of rank {', '.join(map(str, alone))} has "
            f"{apart}, and before step {step} the other ranks do not hold the updated values",
            "job",
        )
        return
    owners: dict[int, int] = {}
    for name in job.parameters(step):
        digests = [record.digests for record in job.at(step)]
        start, after = f"before/{name}", f"after/{name}"
        moved = [r for r in job.holders(step, name) if digests[r][after] != digests[r].get(start)]
        if len(moved) > 1:
            return
        for rank in moved:
            owners[rank] = owners.get(rank, 0) + 1
    if len(owners) > 1:
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(owners.items()))
        yield name_cause(
            "missing-broadcast",
            f"step {step}: only one rank updated each parameter ({counts})",
            "job",
        )


def _outside_writes(job: JobRecording, step: int) -> Iterator[Diagnosis]:
    """Detect parameters that are modified outside `optimizer.step()`, differently across ranks."""
    between, name = first_divergence_before(job, step), first_rank_local_write(job, step)
    if between or name:
        yield name_cause(
            "parameters-modified-outside-step",
            f"{between} differs across ranks before step {step}, but not after the previous step"
            if between
            else f"step {step}: {name} was modified after the forward pass and before "
            "optimizer.step(), differently across ranks",
            "job",
        )


def differing_model_averages(job: JobRecording) -> Iterator[Diagnosis]:
    """Yield a warning for averages of the model (EMA) that every rank updates differently."""
    if len(job.steps) < 2:
        return
    first, last = (job.at(step) for step in (job.steps[0], job.steps[-1]))
    within = [
        name
        for name in averaged_parameters(job)
        if len({r.digests.get(f"before/{name}") for r in last}) > 1
    ]
    if within:
        yield name_cause(
            "ema-differs",
            f"before step {job.steps[-1]} ranks hold different averages of the model, which "
            f"neither gradients nor an optimizer update ({first_names_text(within, 2)})",
        )
        return
    for name in last[0].averages:
        pairs = zip(first, last, strict=True)
        moved = all(a.averages.get(name) != b.averages.get(name) for a, b in pairs)
        if moved and len({record.averages.get(name) for record in last}) > 1:
            yield name_cause(
                "ema-differs",
                f"after step {job.steps[-1]} ranks hold different averages of the model ({name}, "
                "one of the tensors that look like an average)",
            )


def terms_without_gradient(job: JobRecording) -> Iterator[Diagnosis]:
    """Yield a warning for a term of the loss that has no gradient, such as a detached one."""
    found = terms.values_without_gradient(job)
    if not found:
        return
    several = ", ".join(
        f"{value:.6g} at step {step} of rank {rank}"
        for (step, rank), value in sorted(found.items())[:2]
    )
    names = " + ".join(term.name for term in job.records[0, job.steps[0]].trained[0].terms)
    yield name_cause(
        "term-without-gradient",
        f"the loss is {names} plus a term without a gradient ({several}), which trains nothing",
    )


def averaged_sum_losses(job: JobRecording, reference: Reference | None) -> Iterator[Diagnosis]:
    """Yield a warning for a loss that is a sum over samples although the all-reduce averages. It
    does not fail the job, because the learning rate may have been chosen for a sum over one rank's
    samples. A sum that is divided by an unknown number may be a mean over other items, such as
    padded positions.
    """
    replayed = None if reference is None else reference.replayed
    if reference is None or replayed is None or reference_scale(reference) == 1.0:
        return
    first = replayed.steps[0].step
    terms = [term for one in job.records[0, first].trained for term in one.terms]
    if any(term.reduction == "sum" and any(f.divides for f in term.factors) for term in terms):
        return
    given = reference_gradients(reference.tensors(first), Kind.GRADIENT)
    fitted = fit(gradients_of_rank(job, Kind.GRADIENT, 0, first), given)
    if fitted is None or not isclose(fitted[0][0], reference_scale(reference), rel_tol=SAME_FACTOR):
        yield name_cause(
            "double-division",
            f"gradients are {replayed.scale / max(replayed.scales):g}x the single-process "
            "reference, whose loss is a sum over samples: the all-reduce averages the ranks' sums",
            "job-of-sums",
            world=job.world,
        )


def _scaler_cause(result: CheckResult) -> Diagnosis:
    clips_first = result.first_kind is FindingKind.BEFORE_UNSCALE
    cause = "clip-before-unscale" if clips_first else "scaler-skips-differ"
    return name_cause(cause, result.first_reason)


def _settings_cause(result: CheckResult) -> Diagnosis:
    of_rate = result.first is None or is_rate(result.first.parameter)
    cause = "learning-rate-differs" if of_rate else "optimizer-settings-differ"
    return name_cause(cause, result.first_reason, "settings")


def _loss_scale_cause(job: JobRecording, result: CheckResult) -> Diagnosis:
    twice = result.first is not None and float(result.first.actual) < 1
    cause = "accumulation-scaled-twice" if twice else "accumulation-not-scaled"
    if any(axis.kind == "pipeline" for axis in job.ranks[0].axes):
        cause = "pipeline-not-scaled"
    return name_cause(cause, result.first_reason)


def _between_passes(job: JobRecording, step: int) -> Iterator[Diagnosis]:
    """Explain gradients that are not the sum of the step's backward passes, if possible."""
    record = job.records[0, step]
    passes = [one for one in record.passes if one.loss is not None]
    dropped = [number for number, one in enumerate(passes) if not one.live]
    if dropped and fate_of_cleared(job, step) == "unclear":
        yield name_cause(
            "unexplained",
            f"step {step}: gradients were cleared between the {len(passes)} backward passes, and "
            "the optimizer gradients are a multiple of the ranks' mean neither with nor without "
            "them",
            "job-cleared",
        )
    elif dropped:
        yield name_cause(
            "lost-micro-batch",
            f"step {step}: backward pass {dropped[-1]} (from 0) of {len(passes)} contributes to "
            "no gradient passed to the optimizer",
            "job",
        )
    elif record.carried:
        yield name_cause(
            "accumulated-gradient",
            f"step {step}: the gradients passed to the optimizer still include those of the "
            "previous step",
            "job",
        )
    elif (early := clipping_between_passes(job, step)) is not None:
        yield early


def _reduction_causes(job: JobRecording, step: int) -> Iterator[Diagnosis]:
    """Explain reduced gradients that are not the mean of the local gradients."""
    records = job.at(step)
    flags = [p.exchanges for p in records[0].trained]
    if len(flags) > 1 and True in flags and flags[-1] is False:
        at = ", ".join(str(i) for i, flag in enumerate(flags) if flag)
        yield name_cause(
            "sync-in-wrong-micro-batch",
            f"step {step}: DistributedDataParallel synchronized in backward pass {at} (from 0) "
            f"of {len(flags)}, but not in the last",
        )
        return
    found = causes_of_wrong_gradients(job, step)
    alone = [one.cause for one in found] == ["missing-sync"]
    if alone and _agree_at_step(job, step) and records[0].clips:
        yield name_cause(
            "clip-before-sync",
            f"step {step}: each rank clipped its local gradients, and the ranks synchronized "
            "afterwards",
        )
    else:
        yield from found


def causes_of_wrong_gradients(
    job: JobRecording, step: int, kind: Kind = Kind.EXCHANGED
) -> list[Diagnosis]:
    """Return the causes of wrong gradients at a step. `kind` is the stage at which they were
    recorded.
    """
    view = exchange.gradients_at_step(job, step, kind, of_all=True)
    others = [exchange.gradients_at_step(job, s, kind, of_all=True) for s in _near(job, step)]
    others = [one for one in others if one.specs == view.specs]
    earlier = [one for one in others if one.step < step]
    later = next((one for one in others if one.step > step), None)
    found = explain(view, earlier[::-1], later) if view.specs else []
    return [_for_job(one, view) for one in found]


def _near(job: JobRecording, step: int) -> list[int]:
    """Return the next step, and the earlier steps whose gradients may appear at `step` as stale
    gradients.
    """
    place = job.steps.index(step)
    return [*job.steps[max(0, place - MOST_EARLIER) : place], *job.steps[place + 1 : place + 2]]


def _for_job(found: Diagnosis, view: JobStep) -> Diagnosis:
    of_ddp = any(one.exchanges is not None for one in view.job.records[0, view.step].passes)
    if found.cause == "missing-sync" and view.job.ranks[0].bypassed:
        return msgspec.structs.replace(
            found, suggestion=joined_suggestions(found.cause, "bypassed")
        )
    if found.cause not in (_IN_JOBS | _WITH_DDP if of_ddp else _IN_JOBS):
        return found
    return msgspec.structs.replace(
        found, suggestion=joined_suggestions(found.cause, "job", world=len(view.ranks))
    )


def _agree_at_step(job: JobRecording, step: int) -> bool:
    digests = [
        {n: d for n, d in record.digests.items() if n.startswith("step/")}
        for record in job.at(step)
    ]
    return all(one == digests[0] for one in digests[1:])


def _unexplained(failed: Failed, step: int) -> Diagnosis:
    names = ", ".join(dict.fromkeys(check for check, _ in failed))
    evidence = f"from step {step} on: {names}; no known mistake explains the measurements"
    return name_cause("unexplained", evidence, "job")


# -- comparison with the reference -------------------------------------------------------------


def _reference_causes(
    job: JobRecording, reference: Reference, failed: Failed
) -> Iterator[Diagnosis]:
    """Explain failed comparisons with the reference, if all checks without a reference passed."""
    rates = failed.get(("learning rate", IN_FLOAT32))
    if rates is not None and ("learning rate", "-") not in failed:
        yield _rate_cause(job, rates)
    exchanged = ("gradients", ROUNDING) not in failed and ("loss scale", "-") not in failed
    # After parameters diverge across ranks, later differences are consequences.
    start, later = failed.get(("initial state", "-")), failed.get(("agreement", "-"))
    from_step = job.steps[0] if start is not None else None
    if start is None and later is not None:
        from_step = _step_of(later) + (0 if first_different_start(job, _step_of(later)) else 1)
    wrong = failed.get(("gradients", IN_FLOAT32))
    follows = from_step is not None and wrong is not None and _step_of(wrong) >= from_step
    if wrong is not None and wrong.first is not None and exchanged and not follows:
        yield from filter(None, [_factor_causes(job, reference, wrong.first.step)])
    loss = failed.get(("loss", IN_FLOAT32))
    if loss is not None and wrong is None and exchanged and from_step is None:
        at = _step_of(loss)
        yield from filter(None, [_loss_causes(job, at) or _one_factor(job, reference, at)])
    clipped = failed.get(("clipped gradients", IN_FLOAT32))
    # The earliest failure is the cause: ranks diverge after a step and compute different gradients
    # in the next.
    comes_first = clipped is not None and (
        (wrong is None or _step_of(clipped) < _step_of(wrong))
        and (from_step is None or _step_of(clipped) < from_step)
    )
    if clipped and comes_first and exchanged and ("clipping", ROUNDING) not in failed:
        yield _later_causes(job, reference, clipped)
    folded = failed.get((CHECK, IN_FLOAT32))
    if folded is not None and exchanged:
        at = _step_of(folded)
        yield clipping_between_passes(job, at) or _micro_batch_causes(
            job, [*merged_steps(job, reference)], at
        )
    updated = failed.get(("parameters", "-"))
    # Wrong parameters follow from wrong gradients, settings or earlier parameters.
    own = (("learning rate", "-"), ("gradients", ROUNDING), ("clipping", ROUNDING))
    parted = [failed[one] for one in (*own, ("agreement", "-")) if one in failed]
    if updated is not None and all(_step_of(updated) < _step_of(one) for one in parted):
        yield name_cause(
            "wrong-update",
            f"step {_step_of(updated)}: given the same gradients, settings and parameters, the "
            "optimizer of a single process computes different parameters",
            "job",
        )


def _later_causes(job: JobRecording, reference: Reference, result: CheckResult) -> Diagnosis:
    """Explain a gradient that changes between synchronization and the optimizer step."""
    step, rank = _step_of(result), result.first.rank if result.first is not None else 0
    seen = next(one for one in reference.replayed.steps if one.step == step)
    for (own_most, own_norm), (most, norm) in paired_clips(job.records[rank, step], seen):
        if abs(own_most - most) > _LEFT * most:
            return name_cause(
                "clip-norm-differs",
                f"step {step}: the maximum norm for clipping is {own_most:.6g}, but {most:.6g} in "
                "a single process",
            )
        if abs(own_norm - norm) > _LEFT * norm:
            return name_cause(
                "clip-by-local-norm",
                f"step {step}: the norm for clipping is {own_norm:.6g} on rank {rank}, but "
                f"{norm:.6g} in a single process",
            )
    if counted := _tensors_counted_per_rank(job, reference, rank):
        return name_cause(
            "clip-norm-includes-replicas",
            f"step {step}: rank {rank} clips gradients as if {first_names_text(counted, 4)} (of "
            f"{len(counted)} in all) were included {job.world} times in the norm",
        )
    name = result.first.parameter if result.first is not None else "a parameter"
    return name_cause(
        "gradients-modified-before-step",
        f"step {step}: the gradient of {name} matches the single-process reference after the "
        f"all-reduce, but not when rank {rank} steps",
    )


def _tensors_counted_per_rank(job: JobRecording, reference: Reference, rank: int) -> Sequence[str]:
    """Return the only set of parameters that explains a rank's clipping at two steps or more by
    being included once per rank in the norm. A single process clips to the same norm at each.
    """
    fits, norms = list[set[tuple[str, ...]]](), list[float]()
    for seen in reference.replayed.steps if job.world > 1 else ():
        own = gradients_of_rank(job, Kind.GRADIENT, rank, seen.step)
        right = reference_gradients(reference.tensors(seen.step), Kind.GRADIENT)
        fitted = fit(own, right)
        if fitted is None or fitted[1] > _LEFT or not 0 < fitted[0][0] < 1 - _LEFT:
            continue  # not clipped, or not by one factor
        squares = {n: norm_of(g) ** 2 for n, g in right.items() if own.get(n) is not None}
        norms.append(sum(squares.values()) ** 0.5)
        fits.append({*tensors_in_norm(squares, fitted[0][0], job.world, some=True)})
    if len(norms) < 2 or max(norms) - min(norms) > _LEFT * max(norms):
        return ()
    common = set.intersection(*fits)
    return common.pop() if len(common) == 1 else ()


def clipping_between_passes(job: JobRecording, step: int) -> Diagnosis | None:
    """Detect gradients that are clipped before later micro-batches are accumulated."""
    record = job.records[0, step]
    early = [clip.passes for clip in record.clips if 0 < clip.passes < len(record.passes)]
    if not early:
        return None
    return name_cause(
        "clip-in-accumulation",
        f"step {step}: gradients were clipped after {early[0]} of {len(record.passes)} backward "
        "passes, and accumulated further afterwards",
    )


def _micro_batch_causes(job: JobRecording, steps: list[MergedStep], at: int) -> Diagnosis:
    """Explain accumulated gradients that differ from those of one batch in a single process."""
    common = first_most_common_step(steps)
    one = next(step for step in steps if step.step == at)
    said = (
        f"step {at}: in a single process, over {one.passes} backward passes, gradients are "
        f"{one.factor:.6g}x those of one batch with the same samples"
    )
    if expected_factor(one, common) is not None and one.passes != common.passes:
        return name_cause(
            "uneven-accumulation",
            f"{said}, but {common.factor:.6g}x at step {common.step}, which has "
            f"{common.passes} passes",
        )
    if expected_factor(one, common) is not None:
        return name_cause(
            "accumulation-scaled-twice" if one.factor < 1 else "accumulation-not-scaled", said
        )
    counts = _target_counts(job, at)
    if counts:
        return name_cause(
            "unweighted-tokens",
            f"step {at}: the mean losses of the backward passes are weighted equally, but have "
            f"{_number_list(counts)} targets; gradients deviate from those of one batch by "
            f"{one.left:.2g} of their norm",
            "passes",
        )
    return name_cause(
        "unexplained",
        f"step {at}: in a single process, over {one.passes} backward passes, gradients differ "
        f"from those of one batch not only by a factor (a residual of {one.left:.2g} of their "
        "norm)",
        "job-passes",
    )


def _target_counts(job: JobRecording, step: int) -> list[int]:
    """Return the number of targets of a loss in each pass if these numbers differ, else nothing."""
    passes = [one for record in job.at(step) for one in record.trained]
    for call in range(max(len(one.losses) for one in passes)):
        counts = [one.losses[call].counted for one in passes if call < len(one.losses)]
        if len(set(counts)) > 1:
            return counts
    return []


def _number_list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{one:g}" for one in numbers[:8]) + (", ..." if len(numbers) > 8 else "")


def _rate_cause(job: JobRecording, result: CheckResult) -> Diagnosis:
    first = result.first
    assert first is not None
    at_once = first.step == job.steps[0]
    by = float(first.actual) / float(first.expected) if float(first.expected or 0.0) else 0.0
    said = result.first_reason
    if not is_rate(first.parameter):
        return name_cause("optimizer-settings-differ", said, "of-world")
    if at_once:
        evidence = f"{said}: {by:.6g}x, at world size {job.world}"
        return name_cause("learning-rate-differs", evidence, "of-world")
    return name_cause("scheduler-steps-per-rank", f"{said}; gradients of earlier steps are right")


def _factor_causes(job: JobRecording, reference: Reference, step: int) -> Diagnosis | None:
    """Explain the ratio of the job's gradients to the reference's: one factor, or rank weights."""
    found = reference_gradients(reference.tensors(step), Kind.EXCHANGED)
    fitted = fit(gradients_of_rank(job, Kind.EXCHANGED, 0, step), found)
    if fitted is None:
        return None
    of_terms = term_weights(job, reference)
    return (
        _one_factor(job, reference, step)
        or of_terms.cause(job.world)
        or _weight_causes(job, found, step)
        or name_cause(
            "unexplained",
            f"step {step}: gradients are the mean of the ranks' gradients, but differ from the "
            "single-process reference, not only by a factor (a residual of "
            f"{fitted[1]:.2g} of their norm)"
            + (
                f"; the terms of the loss are not judged, since {of_terms.why}" * bool(of_terms.why)
            ),
            "job-weights",
        )
    )


def _one_factor(job: JobRecording, reference: Reference, step: int) -> Diagnosis | None:
    fitted = fit(
        gradients_of_rank(job, Kind.EXCHANGED, 0, step),
        reference_gradients(reference.tensors(step), Kind.EXCHANGED),
    )
    if fitted is None or fitted[1] > min(_LEFT, _SHARE * abs(fitted[0][0] - 1)):
        return None
    if job.joined and abs(fitted[0][0] - job.joined[step]) <= _LEFT * job.joined[step]:
        also = " (or the world size)" if job.joined[step] == job.world else ""
        evidence = (
            f"step {step}: gradients are {fitted[0][0]:.9g} times the single-process reference: "
            f"the number of micro-batches{also}, but a single process makes only one"
        )
        return name_cause("accumulation-not-scaled", evidence)
    call = collective_before_backward(job) if reference.replayed.interacts else None
    if call is not None and isclose(fitted[0][0] * job.world, 1, rel_tol=_LEFT):
        evidence = (
            f"step {step}: gradients are {fitted[0][0]:.6g}x the single-process reference, and the "
            f"loss uses tensors of other ranks ({call.name} at {call.place})"
        )
        return name_cause("double-division", evidence, "loss")
    passes = max(1, len(job.records[0, step].trained))
    return _name_factor(fitted[0][0], step, world=job.world, passes=passes)


def _rank_weights(
    job: JobRecording, found: Gradients, step: int
) -> tuple[tuple[float, ...], float] | None:
    """Return the weights with which the ranks' local gradients add up to the reference, and the
    residual.
    """
    fitted = fit(
        found,
        *(gradients_of_rank(job, Kind.LOCAL_GRADIENT, rank, step) for rank in range(job.world)),
    )
    if fitted is None:
        return None
    # The residual must be small relative to the explained change.
    unlike = max(abs(one * job.world - 1) for one in fitted[0])
    return fitted if fitted[1] <= min(_LEFT, _SHARE * unlike) else None


def reference_weights_ranks(job: JobRecording, reference: Reference) -> bool:
    """Return True if the reference is a mean of the ranks' results with other weights, at every
    step and for the loss as well. Samples then do not interact, but the ranks' means have different
    denominators, such as the number of targets within a mask.
    """
    if _divisors_explain(job, reference):
        return True
    for seen in reference.replayed.steps:
        found = reference_gradients(reference.tensors(seen.step), Kind.EXCHANGED)
        count = sum(one.numel() for one in found.values())
        fitted = _rank_weights(job, found, seen.step)
        if fitted is None or count <= 2 * job.world or abs(sum(fitted[0]) - 1) > _LEFT:
            return False
        losses = [record.loss for record in job.at(seen.step)]
        loss = sum(weight * one for weight, one in zip(fitted[0], losses, strict=True))
        expected = float(reference.tensors(seen.step)["loss"])
        if min(fitted[0]) <= 0 or not isclose(loss, expected, rel_tol=_LEFT):
            return False
    return True


def _divisors_explain(job: JobRecording, reference: Reference) -> bool:
    """Return True if the reference's losses, and not the job's, equal the losses of the passes
    weighted by the number by which each pass divides its sum.
    """
    explains = False
    for seen in reference.replayed.steps:
        passes = [record.trained for record in job.at(seen.step)]
        count = len(passes[0])
        divisors = terms.own_divisors([one for several in passes for one in several])
        actual, expected, bound = paired_losses(job, reference, seen.step)
        if not divisors and abs(actual - expected) <= bound:
            continue  # all have the same
        if not divisors or {len(several) for several in passes} != {count}:
            return False
        weighted = 0.0
        for number in range(count):  # the reference makes as many passes
            shares = divisors[number::count]
            losses = [several[number].loss or 0.0 for several in passes]
            weighted += sum(s * loss for s, loss in zip(shares, losses, strict=True)) / sum(shares)
        if abs(weighted / (job.records[0, seen.step].scale or 1.0) - expected) > bound:
            return False
        explains = explains or abs(actual - expected) > bound
    return explains


def _weight_causes(job: JobRecording, found: Gradients, step: int) -> Diagnosis | None:
    """Diagnose ranks that are weighted equally while the reference weights them differently."""
    fitted, counts = _rank_weights(job, found, step), _target_counts(job, step)
    if fitted is not None and abs(sum(fitted[0]) - 1) <= _LEFT:
        rows = [sum(len(one.rows) for one in record.trained) for record in job.at(step)]
        shares = [number / (sum(rows) or 1) for number in rows]
        by_rows = all(abs(a - b) <= _LEFT for a, b in zip(shares, fitted[0], strict=True))
        said = ", ".join(f"{one:.4g}" for one in fitted[0])
        return name_cause(
            "unweighted-mean" if by_rows else "unweighted-tokens",
            f"step {step}: all ranks are weighted equally; the single-process reference weights "
            f"them {said}"
            + (f", in proportion to their samples {_number_list(rows)}" if by_rows else ""),
            "job-counts",
        )
    if fitted is not None and all(one > _LEFT for one in fitted[0]):
        times = ", ".join(f"{1 / (job.world * one):.4g}x" for one in fitted[0])
        evidence = f"step {step}: the ranks' gradients are {times} the single-process reference"
        return name_cause("wrong-divisor", evidence, "job-by-rank")
    named = _loss_causes(job, step)
    passes = [one for record in job.at(step) for one in record.trained]
    divisors = [round(one, 3) for one in terms.own_divisors(passes)]
    if (counts or divisors) and named is None:
        over = f"over {_number_list(counts)} targets"
        over = over if counts else f"with the divisors {_number_list(divisors)}"
        evidence = f"step {step}: mean losses {over} are weighted equally"
        return name_cause("unweighted-tokens", evidence, "job-step")
    return named


def _loss_causes(job: JobRecording, step: int) -> Diagnosis | None:
    """Detect a rank whose loss has weight 0, or other terms than the loss of rank 0."""
    records = job.at(step)
    local = [
        gradients_of_rank(job, Kind.LOCAL_GRADIENT, rank, step).values()
        for rank in range(job.world)
    ]
    zero = [r for r, own in enumerate(local) if not any(g is not None and g.any() for g in own)]
    heard = [[call.counted for one in records[r].trained for call in one.losses] for r in zero]
    if 0 < len(zero) < job.world and all(not counts or any(counts) for counts in heard):
        return name_cause(
            "dropped-rank",
            f"step {step}: all local gradients of rank {_number_list(zero)} are zero, and those of "
            "the other ranks are not",
            "job",
        )
    terms = [
        ", ".join(dict.fromkeys(term.name for one in record.trained for term in one.terms))
        or "a term that is not a weighted sum of losses"
        for record in records
    ]
    other = next((rank for rank, one in enumerate(terms) if one != terms[0]), 0)
    if not other:
        return None
    return name_cause(
        "loss-term-on-some-ranks",
        f"step {step}: the loss of rank {other} has the terms {terms[other]}, but that of rank 0 "
        f"has {terms[0]}",
    )


def _name_factor(factor: float, step: int, *, world: int, passes: int) -> Diagnosis:
    evidence = f"step {step}: gradients are {factor:.6g}x the single-process reference"

    def close(other: float) -> bool:
        return abs(factor - other) <= _LEFT * other

    if close(world):
        also = " (or the number of gradient accumulation steps)" if passes == world else ""
        evidence += f": the world size{also}"
        return name_cause("missing-division", evidence, "job", world=world)
    if close(1 / world):
        evidence += ": divided by the world size, although the all-reduce already averages"
        return name_cause("double-division", evidence, "job")
    return name_cause("wrong-divisor", evidence, "job")
