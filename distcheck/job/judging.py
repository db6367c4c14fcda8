"""The judgment of a job that was recorded: every check, causes, remarks and notes, as a case."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distcheck.job import accepting, causes, checks, script_changes, settings
from distcheck.job.by_module import by_module, with_evidence
from distcheck.job.checks.accumulation import accumulation
from distcheck.job.checks.averaging import averaging
from distcheck.job.checks.exchange import needless
from distcheck.job.checks.ranks import differs_in_units, finite
from distcheck.job.checks.reference import with_reference
from distcheck.job.options import JobOptions
from distcheck.job.replaying import Reference
from distcheck.job.running import Ran
from distcheck.job.settings import JobSettings
from distcheck.judge.diagnosis.source_lines import site_at
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import LINES, StepRecord
from distcheck.records import (
    Allowance,
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
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import IN_FLOAT32, NO_LAYER, ROUNDING
from distcheck.verification.process_state import with_code
from distcheck.worlds.callers import is_installed

_COLLECTIVE = "collective"


def culprit(
    job: JobRecording, script: str, found: Sequence[Diagnosis], results: Sequence[CheckResult]
) -> CallSite | None:
    """The only line of the kind that all causes are about, over all recorded steps and ranks; None
    where there are several, or it is a package's. A collective is to blame where what the ranks
    exchanged is not what they gave; where it is, a further division came with the loss.
    """
    exchange = "".join(
        {r.verdict for r in results if (r.check, r.layer) == ("gradients", ROUNDING)}
    )
    kinds = {next(_kinds(one.cause, exchange), "") for one in found}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    lines = {line for one in job.records.values() for line in _lines(one, kind)}
    if len(lines) != 1:
        return None
    return _from_here(with_code(site_at(*lines), str(Path(script).absolute())))


def _kinds(cause: str, exchange: str) -> Iterator[str]:
    kinds = known_causes()[cause].lines
    for kind in kinds:
        needed = "fail" if kind == _COLLECTIVE else "pass" if _COLLECTIVE in kinds else exchange
        if kind in (*LINES, _COLLECTIVE) and exchange == needed:
            yield kind


def _lines(step: StepRecord, kind: str) -> Iterable[str]:
    """Those of a kind in a step: of collectives, those after backward that carry more than one
    number.
    """
    if kind != _COLLECTIVE:
        return step.lines.get(kind, ())
    calls = [one for one in step.calls if one.after_backward and one.elements > 1]
    return ["" if is_installed(one.place) else one.place for one in calls]


def _from_here(site: CallSite | None) -> CallSite | None:
    """Its file as seen from the folder that the job was started in."""
    here = Path.cwd()
    if site is None or not Path(site.file).is_relative_to(here):
        return site
    return msgspec.structs.replace(site, file=str(Path(site.file).relative_to(here)))


def judge(
    asked: JobOptions, job: JobRecording, ran: Ran, reference: Reference | None, missing: str
) -> CaseReport:
    """Judges what was recorded; `missing` says why there is no reference."""
    ends = ran.outcomes(job.processes)
    results = [_outcome_check(asked, job, ends)]
    if job.divided_by:
        results.append(_divided(job.divided_by))
        job = dataclasses.replace(job, steps=())  # nothing of them can be compared
    not_finite = [*finite(job)]
    if not_finite and not_finite[0].first is not None:  # what follows from it is not judged
        results += not_finite
        job, reference = _until(not_finite[0].first.step, job, reference)
        missing = missing or "nothing is judged after the first inf or NaN"
    own_steps = averaging(job)
    if own_steps is not None:  # its steps need not be those of one process
        reference, missing = None, own_steps.reason
    compared: list[CheckResult] = []
    agreed: frozenset[int] = frozenset()
    if reference is not None:
        compared, agreed = with_reference(job, reference)
    seen_steps = () if reference is None else reference.replayed.steps
    folded = [] if reference is None else [*accumulation(job, reference)]
    # It has judged the scale of losses that are not torch's, too, but not that of terms.
    scaled = bool(folded) and all(seen.folded != "terms" for seen in seen_steps)
    if job.steps:
        results += checks.without_reference(job, agreed, folded=scaled)
    if reference is not None:
        results = [r for r in results if r.first_kind is not FindingKind.NO_LOCAL]  # a note says so
        results += compared
        if scaled:
            results = [r for r in results if r.check != "loss scale" or r.compared.elements]
        results += folded
    elif not (own_steps or not_finite or job.divided_by) and asked.wants_reference:
        results += [_no_reference(missing)] if job.processes > 1 else []
    results = [
        _not_vacuous(one) if job.world > 1 or one.layer == IN_FLOAT32 else one for one in results
    ]
    results = [_if_known(job, reference, result, results) for result in results]
    of_job = [result for result in results if result.check != "outcome"]
    diagnosis = causes.diagnose(job, of_job, reference)
    if [one.cause for one in diagnosis] == ["unexplained"] and _loss_is_unseen(job):
        results = [_if_seen(result) for result in results]
        diagnosis = causes.diagnose(job, [r for r in results if r.check != "outcome"], reference)
    results, diagnosis, remarks, accepted = _accepted(
        asked, job, reference, results, diagnosis, agreed
    )
    case = CaseReport(
        case=_case_of(asked, job),
        strategy_file=script_of(job.ranks[0].arguments),
        verdict=merge_verdicts([result.verdict for result in results]),
        outcomes=ends,
        checks=tuple(results),
        diagnosis=tuple(diagnosis),
        where=culprit(job, script_of(job.ranks[0].arguments), diagnosis, results),
        replay=_case_of(asked, job).command_line,
        notes=tuple(_notes(asked, job, reference, missing)),
        remarks=tuple(remarks),
        accepted=accepted,
    )
    return case if reference is None else with_evidence(case, by_module(job, reference))


def _accepted(
    asked: JobOptions,
    job: JobRecording,
    reference: Reference | None,
    results: list[CheckResult],
    diagnosis: list[Diagnosis],
    agreed: frozenset[int],
) -> tuple[list[CheckResult], list[Diagnosis], list[Diagnosis], Allowance | None]:
    """Results and causes without those that are accepted, the remarks, and what was accepted. With
    --strict remarks are failures.
    """
    accepted = accepting.allowance(asked.accept, diagnosis)
    common = () if asked.strict else accepting.remarkable(job, reference, results)
    before = diagnosis
    if accepted is not None or any(one.cause in common for one in diagnosis):
        kinds = [*dict.fromkeys((*asked.accept, *common))]
        results = accepting.accept(kinds, job, reference, results, diagnosis)
        of_job = [result for result in results if result.check != "outcome"]
        diagnosis = causes.diagnose(job, of_job, reference)
    left = {one.cause for one in diagnosis} | set(asked.accept)
    remarks = [one for one in before if one.cause in common and one.cause not in left]
    remarks += [*causes.average_differs(job), *causes.divided_sum(job, reference)]
    changes, meant = script_changes.remarks(job, agreed, causes.of_gradients)
    remarks += changes
    results = [_with_reason(r, meant if r.check == "gradients" else "") for r in results]
    if asked.strict and remarks:
        said = "; ".join(one.evidence for one in remarks)
        results.append(CheckResult(check="remarks", layer=NO_LAYER, verdict="fail", reason=said))
        diagnosis, remarks = [*diagnosis, *remarks], []
    return results, diagnosis, remarks, accepted


def _with_reason(result: CheckResult, more: str) -> CheckResult:
    """The same, which says `more` where it passed."""
    if not more or result.verdict != "pass" or result.layer != ROUNDING:
        return result
    return msgspec.structs.replace(result, reason="; ".join(filter(None, [result.reason, more])))


def _until(
    step: int, job: JobRecording, reference: Reference | None
) -> tuple[JobRecording, Reference | None]:
    steps = tuple(one for one in job.steps if one < step)
    kept = () if reference is None else reference.replayed.steps
    seen = tuple(one for one in kept if one.step in steps)
    job = dataclasses.replace(job, steps=steps)
    return job, None if reference is None or not seen else reference.until(seen)


def _case_of(asked: JobOptions, job: JobRecording) -> Case:
    first, script = job.ranks[0], script_of(job.ranks[0].arguments) or script_of(asked.words)
    if not job.steps:
        return case_of_words(asked, script=script, world=job.processes)
    records = job.at(job.steps[0])
    return case_of_words(
        asked, script=script, world=job.processes, backend=first.backend or "none",
        device=first.device, dtype=next(iter(records[0].dtypes.values()), "float32"),
        batch=sum(len(one.rows) for record in records for one in record.passes if one.live),
        steps=len(job.steps),
    )  # fmt: skip


def case_of_words(asked: JobOptions, *, script: str, world: int, **about: Any) -> Case:
    """The case of a job, of which `about` is known; its command line is what was asked for."""
    options = ["--no-reference"] if asked.no_reference else []
    options += ["--reference", asked.reference] if asked.reference else []
    options += ["--weights", asked.weights] if asked.weights else []
    options += ["--mesh", asked.mesh] if asked.mesh else []
    options += ["--steps", str(asked.steps)] if asked.steps != JobSettings().steps else []
    options += ["--from-step", str(asked.from_step)] if asked.from_step else []
    options += ["--resumed-from", asked.resumed_from] if asked.resumed_from else []
    options += ["--modules"] if asked.modules else []
    options += ["--on-cpu"] if asked.on_cpu else []
    options += [word for kind in asked.accept for word in ("--accept", kind)]
    options += ["--strict"] if asked.strict else []
    options += ["--world", str(asked.nproc)] if asked.nproc is not None else []
    default = {"backend": "none", "device": "cpu", "dtype": "float32", "batch": 0, "steps": 0}
    return Case(
        id="job",
        strategy=Path(script).name or "job",
        world=world,
        workload="job",
        data="job",
        layers=(ROUNDING,),
        rerun=False,
        job=(*options, "--", *asked.words),
        **{**default, **about},
    )


def script_of(arguments: Sequence[str]) -> str:
    """The script that a command line runs, as far as it names one."""
    return next((word for word in arguments[1:] if word.endswith(".py")), "")


def _outcome_check(
    asked: JobOptions, job: JobRecording, outcomes: Sequence[Outcome]
) -> CheckResult:
    """Every rank made all steps that were asked for."""
    reasons = []
    verdict = "pass"
    if any(one.outcome is not RankEnd.FINISHED for one in outcomes):
        verdict = "fail"
    elif job.uneven:
        verdict = "unknown"
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in job.uneven.items())
        reasons.append(
            f"ranks made different numbers of steps ({counts}), and only steps that all of them "
            "made are compared: right if Join or similar code handles the last steps; pass "
            f"--steps {min(job.uneven.values())}"
        )
    elif asked.resumed_from is not None:
        pass  # as far as both recordings go
    elif job.processes == 1:
        verdict = "unknown"
        reasons.append(
            "the job has one rank, which has nothing to synchronize; start at least 2: distcheck "
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


def _not_vacuous(result: CheckResult) -> CheckResult:
    """A check that passed and compared nothing is unknown."""
    if result.check == "outcome" or result.verdict != "pass" or result.compared.elements:
        return result
    said = "; ".join(filter(None, ["there was nothing to compare", result.reason]))
    return msgspec.structs.replace(result, verdict="unknown", reason=said)


def _if_known(
    job: JobRecording, reference: Reference | None, result: CheckResult, all_of: list[CheckResult]
) -> CheckResult:
    if reference is None:
        return if_parts(job, result)
    return if_interacts(job, result, all_of) if reference.replayed.interacts else result


def _loss_is_unseen(job: JobRecording) -> bool:
    """Return True if losses may be made of tensors that no recording has: the script makes its
    samples itself and calls no loss of torch. A replay hands out the model's inputs, and not what
    else goes into such a loss, as the rewards of an environment do.
    """
    passes = [one for record in job.records.values() for one in record.trained]
    return bool(passes) and not any(one.losses or one.batches for one in passes)


def _if_seen(result: CheckResult) -> CheckResult:
    """A failure against the reference that is unknown if the loss is unseen."""
    if result.verdict != "fail" or result.layer != IN_FLOAT32:
        return result
    said = (
        "the script computes the loss from tensors that do not come from a DataLoader, and the "
        "reference may have different tensors (rewards of an environment, samples of the script's "
        "own generator); read them from a DataLoader, or pass --no-reference"
    )
    return msgspec.structs.replace(result, verdict="unknown", first=None, worst=None, reason=said)


def if_interacts(
    job: JobRecording, result: CheckResult, all_of: Sequence[CheckResult]
) -> CheckResult:
    """A failure that is unknown where a term of the loss is not a mean over samples, and one batch
    of all has another one: as a loss that balances experts over the samples of each rank. Where the
    mean of the ranks' losses is that of one batch, the term is over all samples here, too.
    """
    losses = [one for one in all_of if (one.check, one.layer) == ("loss", IN_FLOAT32)]
    if any(one.verdict == "pass" and one.compared.elements for one in losses):
        return result
    passes = [one for record in job.records.values() for one in record.trained]
    own = any(term.call < 0 for one in passes for term in one.terms)  # a sum of the script's own
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
    return msgspec.structs.replace(result, verdict="unknown", first=None, worst=None, reason=said)


def if_parts(job: JobRecording, result: CheckResult) -> CheckResult:
    """A failure that is unknown where ranks may have hand-written parts of one model."""
    name = differs_in_units(job)
    if result.verdict != "fail" or result.check not in ("initial state", "agreement") or not name:
        return result
    said = (
        f"ranks that share a model hold different tensors as {name}; without a DTensor or a "
        "reference, shards of one tensor cannot be distinguished from replicas that differ"
    )
    return msgspec.structs.replace(result, verdict="unknown", first=None, worst=None, reason=said)


def _divided(by: str) -> CheckResult:
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


def _of_reference(job: JobRecording, reference: Reference | None, missing: str) -> str:
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
    if reference.replaced:
        text += f"; its options request one rank instead of {', '.join(reference.replaced)}"
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
    notes = [_of_reference(job, reference, missing)]
    if asked.on_cpu:
        notes.append(
            "the job ran on CPUs instead of GPUs, over gloo (--on-cpu): GPU kernels and NCCL are "
            "not judged"
        )
    count, size, seconds = needless(job)
    if count:
        measured = "" if seconds is None else f" and {1000 * seconds:.3g} ms of waiting time"
        notes.append(
            f"DistributedDataParallel synchronized in {count} backward passes before the last of "
            f"their step, {size / 1e6:.3g} MB{measured} each: correct, but slower than no_sync()"
        )
    sums = [s for s in job.steps if not all(record.whole for record in job.at(s))]
    if sums:
        notes.append(
            f"from step {sums[0]} on gradients exceeded --budget and were kept as 64 sums each; "
            "errors that cancel in all sums are not detected"
        )
    if any(not [n for n in r.digests if n.startswith("local/")] for r in job.records.values()):
        notes.append(
            "local gradients were not recorded (sharded parameters, as in FSDP, have none)"
        )
    return notes
