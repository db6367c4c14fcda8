"""Judges a recorded job: all checks, causes, warnings and notes, as a case report."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from distcheck.job import accepting, causes, checks, script_changes, settings
from distcheck.job.by_module import by_module, with_module_evidence
from distcheck.job.checks.accumulation import accumulation
from distcheck.job.checks.averaging import averaging
from distcheck.job.checks.exchange import each_pass_reduces, redundant_synchronization
from distcheck.job.checks.ranks import differs_in_units, finite
from distcheck.job.checks.reference import checks_with_reference
from distcheck.job.options import JobOptions, job_case, script_of
from distcheck.job.replaying import Reference
from distcheck.job.running import CommandResult
from distcheck.job.term_weights import term_weights
from distcheck.judge.diagnosis.communication import warn_of_ledger
from distcheck.judge.diagnosis.source_lines import parse_call_site
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import BEFORE_NOISE, LINES, StepRecord
from distcheck.records import (
    AcceptedChanges,
    CallSite,
    Case,
    CaseReport,
    CheckResult,
    Compared,
    Diagnosis,
    FindingKind,
    Outcome,
    merge_verdicts,
)
from distcheck.records.causes import causes as known_causes
from distcheck.records.causes import name_cause
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import IN_FLOAT32, NO_LAYER, ROUNDING
from distcheck.records.ledger import Ledger, relative
from distcheck.records.odd_ranks import ranks_in_words
from distcheck.verification.process_state import with_source_text
from distcheck.worlds.callers import is_installed

_COLLECTIVE = "collective"


def only_source_line(
    job: JobRecording, script: str, found: Sequence[Diagnosis], results: Sequence[CheckResult]
) -> CallSite | None:
    """Return the source line that all causes concern, if there is only one over all recorded steps
    and ranks. Return None if there are several, or if the line is in a package.

    If reduced gradients differ from the mean of the local ones, the line is that of a collective.
    Otherwise an additional division came with the loss.
    """
    exchange = "".join(
        {r.verdict for r in results if (r.check, r.layer) == ("gradients", ROUNDING)}
    )
    kinds = {next(_kinds_of_lines(one.cause, exchange), "") for one in found}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    return source_line(job, kind, script)


def source_line(job: JobRecording, kind: str, script: str) -> CallSite | None:
    """Return the only recorded source line of a kind, or None."""
    lines = {line for one in job.records.values() for line in _lines(one, kind)}
    return site_of(lines.pop(), script) if len(lines) == 1 else None


def site_of(line: str, script: str) -> CallSite | None:
    """Return a line FILE:LINE of a script or of a module next to it, with its text."""
    return _relative_site(with_source_text(parse_call_site(line), str(Path(script).absolute())))


def _kinds_of_lines(cause: str, exchange: str) -> Iterator[str]:
    kinds = known_causes()[cause].lines
    for kind in kinds:
        needed = "fail" if kind == _COLLECTIVE else "pass" if _COLLECTIVE in kinds else exchange
        if kind in (*LINES, _COLLECTIVE) and exchange == needed:
            yield kind


def _lines(step: StepRecord, kind: str) -> Iterable[str]:
    """Return the source lines of a kind. For collectives, only those after backward and of several
    elements.
    """
    if kind != _COLLECTIVE:
        return step.lines.get(kind, ())
    calls = [one for one in step.calls if one.after_backward and one.elements > 1]
    return ["" if is_installed(one.place) else one.place for one in calls]


def _relative_site(site: CallSite | None) -> CallSite | None:
    here = Path.cwd()
    if site is None or not Path(site.file).is_relative_to(here):
        return site
    return msgspec.structs.replace(site, file=str(Path(site.file).relative_to(here)))


def judge(
    asked: JobOptions,
    job: JobRecording,
    ran: CommandResult,
    reference: Reference | None,
    missing: str,
) -> CaseReport:
    """Judge a recording. `missing` is the reason why there is no reference, or ""."""
    ends = ran.outcomes(job.processes)
    results = [outcome_check(asked, job, ends)]
    if job.divided_by:
        results.append(_unsupported_sharding(job.divided_by))
        job = dataclasses.replace(job, steps=())  # nothing of them can be compared
    not_finite = [*finite(job)]
    if not_finite and not_finite[0].first is not None:  # consequences are not judged
        results += not_finite
        job, reference = _before(not_finite[0].first.step, job, reference)
        missing = missing or "nothing is judged after the first inf or NaN"
    own_steps = averaging(job)
    if own_steps is not None:  # its steps need not equal the reference's
        reference, missing = None, own_steps.reason
    compared: list[CheckResult] = []
    agreed: frozenset[int] = frozenset()
    if reference is not None:
        compared, agreed = checks_with_reference(job, reference)
    seen_steps = () if reference is None else reference.replayed.steps
    folded = [] if reference is None else [*accumulation(job, reference)]
    # It has also judged the scale of losses that are not torch's, but not the scale of terms.
    scaled = bool(folded) and all(seen.folded != "terms" for seen in seen_steps)
    if job.steps:
        results += checks.checks_without_reference(job, agreed, folded=scaled)
    if reference is not None:
        results = [_unknown_if_ranks_divide_samples(reference, r) for r in results]
        results = [r for r in results if r.first_kind is not FindingKind.NO_LOCAL]  # see the note
        results += compared
        if scaled:
            results = [r for r in results if r.check != "loss scale" or r.compared.elements]
        results += folded
    elif not (own_steps or not_finite or job.divided_by or job.processes == 1):
        unwanted = asked.no_reference or asked.from_step or asked.resumed_from
        results += [] if unwanted else [_no_reference(missing)]
    results = [
        _not_vacuous(one) if job.world > 1 or one.layer == IN_FLOAT32 else one for one in results
    ]
    results = [_unknown_without_reference(job, reference, result, results) for result in results]
    of_job = [result for result in results if result.check != "outcome"]
    diagnosis = causes.diagnose(job, of_job, reference)
    if [one.cause for one in diagnosis] == ["unexplained"]:
        results = _unknown_without_same_numbers(job, results)
        diagnosis = causes.diagnose(job, [r for r in results if r.check != "outcome"], reference)
    results, diagnosis, remarks, accepted = _apply_accepted(
        asked, job, reference, results, diagnosis, agreed
    )
    diagnosis = [*_early_exit(ran, job.processes), *diagnosis]
    case = CaseReport(
        case=case_of(asked, job),
        strategy_file=script_of(job.ranks[0].arguments),
        verdict=merge_verdicts([result.verdict for result in results]),
        outcomes=ends,
        checks=tuple(results),
        diagnosis=tuple(diagnosis),
        where=only_source_line(job, script_of(job.ranks[0].arguments), diagnosis, results),
        replay=case_of(asked, job).command_line,
        notes=tuple(_notes(asked, job, reference, missing)),
        remarks=tuple(remarks),
        ledger=(found := ledger_of(job)) and relative(found),
        accepted=accepted,
    )
    if reference is None:
        return case
    return with_module_evidence(case, by_module(case, job, reference))


def _apply_accepted(
    asked: JobOptions,
    job: JobRecording,
    reference: Reference | None,
    results: list[CheckResult],
    diagnosis: list[Diagnosis],
    agreed: frozenset[int],
) -> tuple[list[CheckResult], list[Diagnosis], list[Diagnosis], AcceptedChanges | None]:
    """Return results and causes without accepted deviations, the warnings, and the accepted
    deviations. With --strict warnings are failures.
    """
    accepted = accepting.allowance_of_job(asked.accept, diagnosis)
    common = () if asked.strict else accepting.kinds_that_only_warn(job, reference, results)
    before = diagnosis
    if accepted is not None or any(one.cause in common for one in diagnosis):
        kinds = [*dict.fromkeys((*asked.accept, *common))]
        results = accepting.accept(kinds, job, reference, results, diagnosis)
        of_job = [result for result in results if result.check != "outcome"]
        diagnosis = causes.diagnose(job, of_job, reference)
    left = {one.cause for one in diagnosis} | set(asked.accept)
    remarks = [one for one in before if one.cause in common and one.cause not in left]
    remarks += [*causes.differing_model_averages(job), *causes.averaged_sum_losses(job, reference)]
    remarks += causes.terms_without_gradient(job)
    remarks += warn_of_ledger((held := ledger_of(job)) and relative(held))
    changes, meant = script_changes.remarks(job, agreed)
    remarks += changes
    results = [_with_reason(r, meant if r.check == "gradients" else "") for r in results]
    if asked.strict and remarks:
        said = "; ".join(one.evidence for one in remarks)
        results.append(CheckResult(check="remarks", layer=NO_LAYER, verdict="fail", reason=said))
        diagnosis, remarks = [*diagnosis, *remarks], []
    return results, diagnosis, remarks, accepted


def ledger_of(job: JobRecording) -> Ledger | None:
    """Return the ledger of the last recorded step, of the ranks as they communicated."""
    records = (job.apart or job).records
    return next((r.ledger for _, r in sorted(records.items(), reverse=True) if r.ledger), None)


def _with_reason(result: CheckResult, more: str) -> CheckResult:
    """Return the result with `more` as an additional reason if it passed."""
    if not more or result.verdict != "pass" or result.layer != ROUNDING:
        return result
    return msgspec.structs.replace(result, reason="; ".join(filter(None, [result.reason, more])))


def _before(
    step: int, job: JobRecording, reference: Reference | None
) -> tuple[JobRecording, Reference | None]:
    steps = tuple(one for one in job.steps if one < step)
    kept = () if reference is None else reference.replayed.steps
    seen = tuple(one for one in kept if one.step in steps)
    job = dataclasses.replace(job, steps=steps)
    return job, None if reference is None or not seen else reference.until(seen)


def case_of(asked: JobOptions, job: JobRecording) -> Case:
    first, script = job.ranks[0], script_of(job.ranks[0].arguments) or script_of(asked.words)
    if not job.steps:
        return case_of_command(asked, script=script, world=job.processes)
    records = job.at(job.steps[0])
    return case_of_command(
        asked, script=script, world=job.processes, backend=first.backend or "none",
        device=first.device, dtype=next(iter(records[0].dtypes.values()), "float32"),
        batch=sum(len(one.rows) for record in records for one in record.passes if one.live),
        steps=len(job.steps),
    )  # fmt: skip


# Fields of `JobOptions` that are options of the same name in the command that replays a job.
_REPLAYED = (
    "no_reference", "reference", "weights", "mesh", "steps", "from_step", "resumed_from", "modules",
    "on_cpu", "strict", "keep_going", "twice",
)  # fmt: skip


def case_of_command(asked: JobOptions, *, script: str, world: int, **about: Any) -> Case:
    """Return the case of a job with the known fields `about` and the requested command line."""
    options, default = list[str](), JobOptions(words=asked.words)
    for name in _REPLAYED:
        value = getattr(asked, name)
        if value and value != getattr(default, name):
            options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if asked.deadline_s != default.deadline_s:
        options += ["--deadline", f"{asked.deadline_s:g}s"]
    about = {"id": "job", "layers": (ROUNDING,), **about}
    return job_case(asked, options, script=script, world=world, **about)


def outcome_check(asked: JobOptions, job: JobRecording, outcomes: Sequence[Outcome]) -> CheckResult:
    """Check that every rank made all requested steps."""
    reasons = []
    verdict = "pass"
    if any(one.outcome is not RankEnd.FINISHED for one in outcomes):
        verdict = "fail"
    elif job.uneven:
        verdict = "unknown"
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in job.uneven.items())
        reasons.append(
            f"ranks made different numbers of steps ({counts}), and only steps that all of them "
            "made are compared: this is right if Join or similar code handles the last steps; "
            f"pass --steps {min(job.uneven.values())}"
        )
    elif asked.resumed_from is not None or asked.twice:
        pass  # as far as both recordings reach
    elif job.processes == 1:
        verdict = "unknown"
        reasons.append(
            "the job has only one rank, which has nothing to synchronize; start at least 2: "
            "distcheck "
            "job --world 2 -- python train.py"
        )
    elif len(job.steps) < asked.steps:
        verdict = "unknown"
        last = asked.from_step + len(job.steps)
        reasons.append(
            f"the job ended after step {last - 1}, before {asked.steps} steps were recorded; pass "
            f"--steps {len(job.steps)}"
        )
    return CheckResult(
        check="outcome",
        layer=NO_LAYER,
        verdict=verdict,  # type: ignore[arg-type]
        compared=Compared(ranks=job.processes, steps=len(job.steps)),
        reason="; ".join(reasons),
    )


def _early_exit(ran: CommandResult, world: int) -> list[Diagnosis]:
    if not (exited := ran.early_exits(world)):
        return []
    others = ranks_in_words([one.rank for one in ran.raised])
    evidence = f"{ranks_in_words(exited)} exited without an exception while {others} communicated"
    return [name_cause("collective-mismatch", evidence, "exited")]


def _not_vacuous(result: CheckResult) -> CheckResult:
    """Turn a pass that compared nothing into unknown."""
    if result.check == "outcome" or result.verdict != "pass" or result.compared.elements:
        return result
    said = "; ".join(filter(None, ["there was nothing to compare", result.reason]))
    return msgspec.structs.replace(result, verdict="unknown", reason=said)


def _unknown_without_reference(
    job: JobRecording, reference: Reference | None, result: CheckResult, all_of: list[CheckResult]
) -> CheckResult:
    if reference is None:
        return unknown_if_sharded(job, result)
    if result.verdict != "fail" or not reference.replayed.interacts:
        return result
    found = term_weights(job, reference)
    if (found.odd and found.certain and not found.why) or (
        causes.reference_weights_ranks(job, reference)
    ):
        return result
    return unknown_if_samples_interact(job, result, all_of, found.why)


def _unknown_if_ranks_divide_samples(reference: Reference, result: CheckResult) -> CheckResult:
    """Turn a failure into unknown if ranks read the same samples, because each rank may give its
    model another part of them.
    """
    if not (reference.replayed.divides and result.first_kind is FindingKind.SAME_SAMPLES):
        return result
    said = "ranks read the same samples, and each gives its model a different part of them"
    return _with_verdict(result, "pass", said)


def _with_verdict(
    result: CheckResult, verdict: Literal["pass", "unknown"], why: str
) -> CheckResult:
    return msgspec.structs.replace(result, verdict=verdict, first=None, worst=None, reason=why)


def _loss_is_unseen(job: JobRecording) -> bool:
    """Return True if losses may use tensors that no recording has: the script generates its samples
    and calls no loss function of torch. A replay replaces only the model's inputs, and not other
    tensors of the loss, such as rewards of an environment.
    """
    passes = [one for record in job.records.values() for one in record.trained]
    return bool(passes) and not any(one.losses or one.batches for one in passes)


def _unknown_if_loss_unrecorded(result: CheckResult) -> CheckResult:
    """Turn a failure against the reference into unknown if the loss is not recorded."""
    if result.verdict != "fail" or result.layer != IN_FLOAT32:
        return result
    said = (
        "the script computes the loss from tensors that do not come from a DataLoader, and the "
        "reference may have different tensors (rewards of an environment, samples of the script's "
        "own generator); read them from a DataLoader, or pass --no-reference"
    )
    return _with_verdict(result, "unknown", said)


def _unknown_without_same_numbers(
    job: JobRecording, results: list[CheckResult]
) -> list[CheckResult]:
    """Turn failures into unknown if a single process has other numbers in its loss or gradients."""
    if _loss_is_unseen(job):
        results = [_unknown_if_loss_unrecorded(result) for result in results]
    agree = all(one.verdict == "pass" for one in results if one.check == "agreement")
    if agree and (noisy := _ranks_that_add_noise(job)):
        results = [_unknown_if_noise_differs(result, noisy) for result in results]
    return results


def _ranks_that_add_noise(job: JobRecording) -> list[int]:
    """Return the ranks that draw random numbers between backward and an optimizer step."""
    places = ((rank, step) for rank in range(job.world) for step in job.steps)
    return sorted({place[0] for place in places if BEFORE_NOISE in job.tensors(*place)})


def _unknown_if_noise_differs(result: CheckResult, ranks: list[int]) -> CheckResult:
    """Turn a failure of gradients into unknown: the reference may have added other noise."""
    if result.verdict != "fail" or result.check not in ("gradients", "clipped gradients"):
        return result
    who = ranks_in_words(ranks)
    said = (
        f"the script draws random numbers between backward and optimizer.step() on {who}, and if "
        "they change the gradients, a single process cannot add the same noise; disable the noise "
        "for this check"
    )
    return _with_verdict(result, "unknown", said)


def unknown_if_samples_interact(
    job: JobRecording, result: CheckResult, all_of: Sequence[CheckResult], why: str = ""
) -> CheckResult:
    """Turn a failure into unknown if a term of the loss is not a mean over samples, such as a
    load-balancing loss over each rank's samples, because it has another value for the joint batch.
    If the mean of the ranks' losses equals the reference's loss, the term covers the samples of all
    ranks in the job as well.
    """
    losses = [one for one in all_of if (one.check, one.layer) == ("loss", IN_FLOAT32)]
    if any(one.verdict == "pass" and one.compared.elements for one in losses):
        return result
    passes = [one for record in job.records.values() for one in record.trained]
    own = any(term.call < 0 for one in passes for term in one.terms)  # a sum computed by the script
    unread = own or any(one.unread for one in passes)
    of_sums = ("gradients", "clipped gradients", "loss")
    is_it = result.verdict == "fail" and result.layer == IN_FLOAT32 and result.check in of_sums
    if not (unread and is_it):
        return result
    said = (
        "a term of the loss is not a mean over samples, so its value for one batch of all samples "
        "differs from that of the ranks' batches (for example a load-balancing loss over each "
        "rank's own samples); leave it out for this check, or compute it over the samples of all "
        "ranks"
    )
    said = f"the scale of the loss is not judged, since {why}" if why else said
    return _with_verdict(result, "unknown", said)


def unknown_if_sharded(job: JobRecording, result: CheckResult) -> CheckResult:
    """Turn a failure into unknown if ranks may hold hand-written shards of one model."""
    name = differs_in_units(job)
    if result.verdict != "fail" or result.check not in ("initial state", "agreement") or not name:
        return result
    said = (
        f"ranks that share a model hold different tensors as {name}; without a DTensor or a "
        "reference, shards of one tensor cannot be distinguished from replicas that differ"
    )
    return _with_verdict(result, "unknown", said)


def _unsupported_sharding(by: str) -> CheckResult:
    return CheckResult(
        check="agreement",
        layer=NO_LAYER,
        verdict="unknown",
        reason=f"ranks hold shards of one model ({by}), which distcheck job cannot unshard: judge "
        "the job with DistributedDataParallel or fully_shard instead, and judge the layout with "
        "distcheck verify",
    )


def _no_reference(missing: str) -> CheckResult:
    return CheckResult(
        check="reference",
        layer=IN_FLOAT32,
        verdict="unknown",
        reason=f"{missing}; --no-reference judges the job without one",
    )


def _note_on_reference(job: JobRecording, reference: Reference | None, missing: str) -> str:
    if reference is None:
        return f"no reference run, since {missing}: ranks are compared only with each other"
    replayed = reference.replayed
    how = {
        settings.TOGETHER: "the ranks' batches concatenated",
        settings.IN_TURN: "the ranks' batches one after the other",
        settings.BY_RANK: "each rank's batches separately, and the mean of their gradients",
    }.get(replayed.mode, "batches of the ranks")
    text = f"the reference is the same script in a single process, with {how}"
    text += f" ({replayed.why})" if replayed.why else ""
    text += ", the micro-batches of a step in one forward pass" if job.joined else ""
    if replayed.own_inputs:
        text += f", the script's own inputs (the ranks' samples), since {replayed.own_inputs}"
    if replayed.replaced:
        text += f"; its options request one rank instead of {', '.join(replayed.replaced)}"
    covered = {one.step for one in replayed.steps} & {*job.steps}
    text += f"; it covers {len(covered)} of {len(job.steps)} steps"
    ended = (
        len(replayed.steps) < len(job.steps)
        and "the script makes no more steps in a single process"
    )
    text += f", since {replayed.failure or ended}" if replayed.failure or ended else ""
    text += "; its tolerances are measured by perturbing every parameter by one ULP"
    text += "" if replayed.steps[0].draws else ", which failed"
    if replayed.unfolded:
        text += f"; accumulation is not compared with one batch, since {replayed.unfolded}"
    return text


def _notes(
    asked: JobOptions, job: JobRecording, reference: Reference | None, missing: str
) -> list[str]:
    notes = [_note_on_reference(job, reference, missing)]
    if asked.on_cpu:
        notes.append(
            "the job ran on CPUs instead of GPUs, over gloo (--on-cpu): GPU kernels and NCCL are "
            "not judged"
        )
    count, size, seconds = redundant_synchronization(job)
    if count:
        measured = "" if seconds is None else f" and {1000 * seconds:.3g} ms of waiting time"
        notes.append(
            f"DistributedDataParallel synchronized in {count} backward passes before the last of "
            f"their step, {size / 1e6:.3g} MB{measured} each: correct, but slower than no_sync()"
        )
    notes += filter(None, [each_pass_reduces(ledger_of(job), job)])
    sums = [s for s in job.steps if not all(record.whole for record in job.at(s))]
    if sums:
        notes.append(
            f"from step {sums[0]} on, the gradients exceeded --budget, so only 64 weighted sums "
            "of the "
            "elements of each were kept; an error that cancels in all of them is not detected"
        )
    if any(not [n for n in r.digests if n.startswith("local/")] for r in job.records.values()):
        notes.append(
            "local gradients were not recorded (sharded parameters, as in FSDP, have none)"
        )
    return notes
