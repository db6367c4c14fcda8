"""The story of `distcheck job`: run the command, read what its ranks wrote, judge, report."""

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distcheck.errors import UsageError
from distcheck.job import (
    accepting,
    causes,
    checks,
    leftovers,
    reading,
    replaying,
    running,
    settings,
)
from distcheck.job.checks.exchange import NOT_SEEN, needless
from distcheck.job.checks.folded import accumulation
from distcheck.job.checks.reference import with_reference
from distcheck.job.reading import Recording
from distcheck.job.replaying import NoReferenceError, Reference
from distcheck.job.running import Ran
from distcheck.job.settings import Settings
from distcheck.records import (
    Case,
    CaseReport,
    CheckResult,
    Compared,
    Outcome,
    Report,
    merge_verdicts,
)
from distcheck.records.ends import RankEnd
from distcheck.records.layers import IN_FLOAT32, NO_LAYER, ROUNDING
from distcheck.store.origin import origin_here

_NOT_SHOWN = (
    "steps before and after those that were recorded",
    "other worlds, other seeds, other hardware",
    "evaluation, checkpoints and metrics",
)


@dataclass(frozen=True)
class Asked:
    """What a person asks of a job."""

    words: tuple[str, ...]
    nproc: int | None = None
    steps: int = 8
    from_step: int = 0
    budget: int = 4 << 30
    keep_going: bool = False
    save: str | None = None
    reference: bool = True
    on_cpu: bool = False
    accept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        accepting.check_kinds(self.accept)
        if not 1 <= self.steps <= settings.MOST_STEPS:
            raise UsageError(f"--steps must be between 1 and {settings.MOST_STEPS}")
        if self.from_step < 0:
            raise UsageError("--from-step must be at least 0")


def judge_job(asked: Asked) -> Report:
    """Runs the job and judges it. Raises the errors of `running.check_recorded`."""
    command = running.command_of(asked.words, asked.nproc)
    if asked.save is not None and Path(asked.save).exists():
        raise UsageError(f"--save {asked.save} is there already; give the name of a new folder")
    with leftovers.folder() as folder:
        made = origin_here()
        recorded, copy = folder / "recording", folder / "copy"
        recorded.mkdir()
        missing = _why_none(asked) or replaying.copy_folder(copy)
        file = settings.write(_settings_of(asked), recorded)
        ran = running.run(command, file)
        running.check_recorded(recorded, ran, command)
        job = reading.read(recorded)
        reference = None
        if not missing:
            reference, missing = _replay(asked, job, copy, folder / "reference")
        case = _judge(asked, job, ran, reference, missing)
        if asked.save is not None:
            shutil.copytree(recorded, asked.save)
        from distcheck.verification.inspection import environment

        return Report(
            environment=environment(case.case.backend, case.case.device),
            cases=(case,),
            made=made,
            not_shown=_NOT_SHOWN,
        )


def _settings_of(asked: Asked) -> Settings:
    return Settings(
        steps=asked.steps,
        from_step=asked.from_step,
        budget=asked.budget,
        keep_going=asked.keep_going,
        on_cpu=asked.on_cpu,
    )


def _why_none(asked: Asked) -> str:
    if not asked.reference:
        return "--no-reference was given"
    return "it starts at step 0, and --from-step was given" if asked.from_step else ""


def _replay(asked: Asked, job: Recording, copy: Path, folder: Path) -> tuple[Reference | None, str]:
    """The reference, or why there is none."""
    if job.world == 1 or not job.steps or job.divided_by:
        return None, "there is nothing to compare it with"
    folder.mkdir()
    try:
        return replaying.replay(job, copy, folder, on_cpu=asked.on_cpu), ""
    except NoReferenceError as error:
        return None, str(error)


def _judge(
    asked: Asked, job: Recording, ran: Ran, reference: Reference | None, missing: str
) -> CaseReport:
    outcomes = _outcomes(job, ran)
    results = [_outcome_check(asked, job, outcomes)]
    if job.divided_by:
        results.append(_divided(job.divided_by))
        job = dataclasses.replace(job, steps=())  # nothing of them can be compared
    compared: list[CheckResult] = []
    agreed: frozenset[int] = frozenset()
    if reference is not None:
        compared, agreed = with_reference(job, reference)
    if job.steps:
        results += checks.without_reference(job, agreed)
    if reference is not None:
        results = [r for r in results if r.reason != NOT_SEEN]  # a note says so
        results += compared
        folded = [*accumulation(job, reference)]
        # It has judged the scale of losses that are not torch's, too, but not that of terms.
        if folded and all(seen.folded != "terms" for seen in reference.replayed.steps):
            results = [r for r in results if r.check != "loss scale" or r.compared.elements]
        results += folded
    elif asked.reference and not asked.from_step and job.world > 1 and not job.divided_by:
        results.append(_no_reference(missing))
    results = [_not_vacuous(result) if job.world > 1 else result for result in results]
    of_job = [result for result in results if result.check != "outcome"]
    diagnosis = causes.diagnose(job, of_job, reference)
    accepted = accepting.allowance(asked.accept, diagnosis)
    if accepted is not None:
        results = accepting.accept(asked.accept, job, reference, results, diagnosis)
        of_job = [result for result in results if result.check != "outcome"]
        diagnosis = causes.diagnose(job, of_job, reference)
    return CaseReport(
        case=_case_of(asked, job),
        strategy_file=_script_of(job.ranks[0].arguments),
        verdict=merge_verdicts([result.verdict for result in results]),
        outcomes=outcomes,
        checks=tuple(results),
        diagnosis=tuple(diagnosis),
        replay=_case_of(asked, job).command_line,
        notes=tuple(_notes(asked, job, reference, missing)),
        accepted=accepted,
    )


def _case_of(asked: Asked, job: Recording) -> Case:
    first = job.ranks[0]
    dtype = "float32"
    batch = 0
    if job.steps:
        records = job.at(job.steps[0])
        dtype = next(iter(records[0].dtypes.values()), dtype)
        batch = sum(len(one.rows) for record in records for one in record.passes)
    options = [] if asked.reference else ["--no-reference"]
    options += ["--steps", str(asked.steps)] if asked.steps != Settings().steps else []
    options += ["--from-step", str(asked.from_step)] if asked.from_step else []
    options += ["--on-cpu"] if asked.on_cpu else []
    options += [word for kind in asked.accept for word in ("--accept", kind)]
    options += ["--nproc", str(asked.nproc)] if asked.nproc is not None else []
    return Case(
        id="job",
        strategy=Path(_script_of(first.arguments)).name or "job",
        world=job.world,
        backend=first.backend or "none",
        device=first.device,
        dtype=dtype,
        workload="job",
        data="job",
        batch=batch,
        steps=len(job.steps),
        layers=(ROUNDING,),
        rerun=False,
        job=(*options, "--", *asked.words),
    )


def _script_of(arguments: Sequence[str]) -> str:
    return next((word for word in arguments[1:] if word.endswith(".py")), "")


def _outcomes(job: Recording, ran: Ran) -> tuple[Outcome, ...]:
    raised = dict(ran.raised)
    found = []
    for rank in range(job.world):
        if rank in raised:
            found.append(Outcome(rank=rank, outcome=RankEnd.RAISED, text=raised[rank]))
        else:
            found.append(Outcome(rank=rank, outcome=RankEnd.FINISHED))
    if ran.code and not raised:
        detail = f"the command ended with exit code {ran.code}"
        found[0] = Outcome(rank=0, outcome=RankEnd.EXITED, ended_by=detail)
    return tuple(found)


def _outcome_check(asked: Asked, job: Recording, outcomes: Sequence[Outcome]) -> CheckResult:
    """Every rank made all steps that were asked for."""
    reasons = []
    verdict = "pass"
    if any(one.outcome is not RankEnd.FINISHED for one in outcomes):
        verdict = "fail"
    elif job.uneven:
        verdict = "fail"
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in job.uneven.items())
        reasons.append(f"ranks made different numbers of steps ({counts})")
    elif job.world == 1:
        verdict = "unknown"
        reasons.append(
            "the job has one rank, which exchanges nothing; start at least 2: distcheck job "
            "--nproc 2 -- python train.py"
        )
    elif len(job.steps) < asked.steps:
        verdict = "unknown"
        last = asked.from_step + len(job.steps)
        reasons.append(
            f"the job ended after step {last - 1}; {asked.steps} steps were to be recorded: give "
            f"--steps {len(job.steps)}"
        )
    return CheckResult(
        check="outcome",
        layer=NO_LAYER,
        verdict=verdict,  # type: ignore[arg-type]
        compared=Compared(ranks=job.world, steps=len(job.steps)),
        reason="; ".join(reasons),
    )


def _not_vacuous(result: CheckResult) -> CheckResult:
    """A check that passed and compared nothing is unknown."""
    if result.check == "outcome" or result.verdict != "pass" or result.compared.elements:
        return result
    said = "; ".join(filter(None, ["nothing was there to be compared", result.reason]))
    return msgspec.structs.replace(result, verdict="unknown", reason=said)


def _divided(by: str) -> CheckResult:
    return CheckResult(
        check="agreement",
        layer=NO_LAYER,
        verdict="unknown",
        reason=f"ranks hold parts of one model ({by}), which are not put together here: have the "
        "job judged with DistributedDataParallel or fully_shard in its place, and judge the layout "
        "by distcheck verify",
    )


def _no_reference(missing: str) -> CheckResult:
    return CheckResult(
        check="reference",
        layer=IN_FLOAT32,
        verdict="unknown",
        reason=f"{missing}; --no-reference judges the job without one",
    )


def _of_reference(job: Recording, reference: Reference | None, missing: str) -> str:
    """What the job was compared with, in a sentence."""
    if reference is None:
        return f"no reference run, since {missing}: judged by what the ranks show of each other"
    replayed = reference.replayed
    how = {
        settings.TOGETHER: "the ranks' batches put together",
        settings.IN_TURN: "the ranks' batches one after the other",
        settings.BY_RANK: "each rank's batches by themselves, and the mean of their gradients",
    }.get(replayed.mode, "batches of the ranks")
    text = f"the reference is the same script as one process, with {how}"
    text += f" ({replayed.why})" if replayed.why else ""
    text += f"; it covers {len(replayed.steps)} of {len(job.steps)} steps"
    text += f", since {replayed.failure}" if replayed.failure else ""
    text += "; its tolerances are measured by moving every parameter by one ULP"
    text += "" if replayed.steps[0].draws else ", which failed"
    if len(replayed.scales) > 1 and replayed.scale != 1:
        text += (
            f"; gradients are {replayed.scale:g} times those of one process, whose loss is a sum "
            "over samples that has no scale of its own"
        )
    if replayed.unfolded:
        text += f"; accumulation is not compared with one batch, since {replayed.unfolded}"
    return text


def _notes(asked: Asked, job: Recording, reference: Reference | None, missing: str) -> list[str]:
    notes = [_of_reference(job, reference, missing)]
    if asked.on_cpu:
        notes.append(
            "the job ran on CPUs in place of GPUs, over gloo (--on-cpu): kernels and NCCL are "
            "not judged"
        )
    count, size, seconds = needless(job)
    if count:
        measured = "" if seconds is None else f" and {1000 * seconds:.3g} ms of waiting"
        notes.append(
            f"DistributedDataParallel exchanged in {count} backward passes that another one of the "
            f"same step followed, {size / 1e6:.3g} MB{measured} each: right and slower than "
            "no_sync()"
        )
    sums = [s for s in job.steps if not all(record.whole for record in job.at(s))]
    if sums:
        notes.append(
            f"from step {sums[0]} on gradients were beyond --budget and kept as 64 sums each; what "
            "cancels in all of them is not seen"
        )
    if any(not [n for n in r.digests if n.startswith("local/")] for r in job.records.values()):
        notes.append(
            "gradients before the exchange were not seen (parameters that are divided among the "
            "ranks, as by FSDP, have none)"
        )
    return notes
