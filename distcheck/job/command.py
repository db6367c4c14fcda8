"""The story of `distcheck job`: run the command, read what its ranks wrote, judge, report."""

import contextlib
import dataclasses
from pathlib import Path

import msgspec

from distcheck import private
from distcheck.errors import CannotRunError, UsageError
from distcheck.job import (
    leftovers,
    machines,
    perturbed_runs,
    replaying,
    resuming,
    running,
    settings,
)
from distcheck.job.by_module import diagnose_modules, needs_diagnosis
from distcheck.job.checks.averaging import averaging
from distcheck.job.copying import Copy, copy_project
from distcheck.job.inside.joining import joined
from distcheck.job.judging import case_of_words, judge, script_of
from distcheck.job.machines import Gathered
from distcheck.job.options import JobOptions
from distcheck.job.replaying import NoReferenceError, Reference
from distcheck.job.resuming import Earlier
from distcheck.job.running import Ran
from distcheck.job.settings import JobSettings
from distcheck.judge.diagnosis import outcomes
from distcheck.judge.divergence.noise_floor import NoiseFloor
from distcheck.judge.divergence.noise_floor import write as write_noise_floor
from distcheck.machine.resources import keep_freed_memory
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import REPORT, JobRecording
from distcheck.records import CaseReport, CheckResult, Compared, Report
from distcheck.records.layers import NO_LAYER
from distcheck.records.run_facts import Origin
from distcheck.reports.json_report import render_json
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import summarize
from distcheck.store.origin import origin_here
from distcheck.store.run_folder import Store

_NOT_SHOWN = (
    "steps before and after those that were recorded",
    "other worlds, other seeds, other hardware",
    "evaluation, checkpoints and metrics",
)


def judge_job(asked: JobOptions, live: LiveProgress) -> Report:
    """Runs the job and judges it. Raises the errors of `running.check_recorded`."""
    command = running.command_of(asked.words, asked.nproc)
    if asked.save is not None and Path(asked.save).exists():
        raise UsageError(f"--save {asked.save} is there already; give the name of a new folder")
    earlier = resuming.read(Path(asked.resumed_from)) if asked.resumed_from is not None else None
    with leftovers.folder() as folder:
        made = origin_here()
        recorded, copy = folder / "recording", folder / "copy"
        private.folder(recorded, is_new=True)
        missing = _why_none(asked)
        needs_copy = asked.save is not None or not missing
        copied = copy_project(copy) if needs_copy else Copy(Path.cwd(), copy, missing)
        file = settings.write(_settings_of(asked), recorded)
        live.phase(f"[1/3] recording {asked.steps} steps of the job")
        # What torchrun sets where several ranks share a machine; it says so in four lines.
        threads = {"OMP_NUM_THREADS": "1"} if (asked.nproc or 0) > 1 else {}
        ran = running.run(command, file, deadline_s=asked.deadline_s, defaults=threads)
        if ran.hung:
            return _kept(_report(made, _hung(asked, ran)))
        running.check_recorded(recorded, ran, command)
        keep_freed_memory()
        with machines.gathered(recorded, ran) as whole:
            with live:
                report, job, noise_floor = _judged(asked, whole, copied, folder, live, earlier)
                report = msgspec.structs.replace(report, made=made)
            whole.tell(int(report.exit_code), summarize(report))
        report = _kept(report)
        if asked.save is not None:
            try:
                reading.keep(job, Path(asked.save))
                write_noise_floor(noise_floor, Path(asked.save))
                private.write(Path(asked.save, REPORT), render_json(report))
            except (CannotRunError, OSError) as error:  # the verdict stands all the same
                return msgspec.structs.replace(report, save_error=str(error))
            return msgspec.structs.replace(report, saved_to=asked.save)
        return report


def _judged(
    asked: JobOptions,
    whole: Gathered,
    copied: Copy,
    folder: Path,
    live: LiveProgress,
    earlier: Earlier | None,
) -> tuple[Report, JobRecording, NoiseFloor]:
    """The report of a whole recording; what was judged of it; and how far right runs part."""
    missing = _why_none(asked) or copied.missing
    job = perturbed_runs.read_whole(folder / "recording", folder / "whole", asked.mesh)
    own_steps = averaging(job)
    if own_steps is None:
        job = dataclasses.replace(job, steps=job.steps[: asked.steps])
    missing = missing or ("" if own_steps is None else own_steps.reason)
    reference, noise_floor = None, NoiseFloor()
    if asked.save is not None and whole.hosts:
        noise_floor = NoiseFloor(why="the job runs on several machines, and was not run once more")
    elif asked.save is not None:
        live.phase("[1/3] running it twice more, its parameters moved by one ULP")
        noise_floor = perturbed_runs.measured(
            job, _settings_of(asked), running.command_of(asked.words, asked.nproc), copied,
            folder / "moved", deadline_s=asked.deadline_s,
        )  # fmt: skip
    if not missing:
        live.phase("[2/3] replaying them as one process")
        job, reference, missing = _replay(asked, job, copied, folder / "reference")
    live.phase("[3/3] judging")
    case = judge(asked, job, whole.ran, reference, missing)
    if reference is not None and not whole.hosts and needs_diagnosis(case):
        live.phase("[3/3] a second look, at its modules")
        case = diagnose_modules(case, job, asked, _settings_of(asked), copied, folder / "again")
    case = case if earlier is None else resuming.judged(case, earlier, job)
    return _report(None, case), job, noise_floor


def _report(made: Origin | None, case: CaseReport) -> Report:
    from distcheck.verification.inspection import environment

    return Report(
        environment=environment(case.case.backend, case.case.device),
        cases=(case,),
        made=made,
        not_shown=_NOT_SHOWN,
    )


def _kept(report: Report) -> Report:
    """The report with its folder among the runs of this one, where that can be written; the
    recording is not kept.
    """
    store = Store.by_default()
    if store is not None:
        with contextlib.suppress(OSError):
            store.write_case(report.cases[0].case)
            store.write_report(render_json(report))
            return msgspec.structs.replace(report, saved_to=str(store.folder))
    return report


def _hung(asked: JobOptions, ran: Ran) -> CaseReport:
    """A job that did not go on: nothing else of it is judged."""
    made = [one.step for one in ran.hung if one.step is not None]
    where = f"after step {max(made)}" if made else "before its first step"
    check = CheckResult(
        check="outcome", layer=NO_LAYER, verdict="fail", compared=Compared(ranks=len(ran.hung)),
        reason=f"the job hangs {where}, and was ended",
    )  # fmt: skip
    case = case_of_words(asked, script=script_of(asked.words), world=len(ran.hung))
    return CaseReport(
        case=case, strategy_file=script_of(asked.words), verdict="fail", outcomes=ran.hung,
        checks=(check,), diagnosis=tuple(outcomes.explain(ran.hung)), replay=case.command_line,
    )  # fmt: skip


def _settings_of(asked: JobOptions) -> JobSettings:
    return JobSettings(
        steps=asked.steps,
        from_step=asked.from_step,
        budget=asked.budget,
        keep_going=asked.keep_going,
        kept=asked.save is not None or asked.resumed_from is not None,
        modules=asked.watches_modules,
        ops=asked.ops,
        mesh=asked.mesh,
        on_cpu=asked.on_cpu,
    )


def _why_none(asked: JobOptions) -> str:
    if asked.resumed_from is not None:
        return "it is compared with the job that it continues"
    if asked.no_reference:
        return "--no-reference was given"
    return "it starts at step 0, and --from-step was given" if asked.from_step else ""


def _replay(
    asked: JobOptions, job: JobRecording, copy: Copy, folder: Path
) -> tuple[JobRecording, Reference | None, str]:
    """The job as it is compared, and the reference, or why there is none."""
    if job.processes == 1 or not job.steps or job.divided_by:
        return job, None, "there is nothing to compare it with"
    if any(len(replica) > 1 for replica in job.replicas) and any(
        one.draws and one.live for record in job.records.values() for one in record.passes
    ):
        missing = (
            "ranks that train one model draw random numbers in forward passes, each for its own "
            "part, and one process draws them for all; set dropout to 0 for this check"
        )
        return job, None, missing
    private.folder(folder, is_new=True)
    try:
        return job, replaying.replay(
            job, copy, folder, on_cpu=asked.on_cpu, weights=asked.weights or "",
            command=asked.reference or "", deadline_s=asked.deadline_s,
            modules=asked.watches_modules,
        ), ""  # fmt: skip
    except NoReferenceError as error:
        if error.joins and not job.joined:
            return _replay(asked, joined(job), copy, folder.with_name(f"{folder.name}-joined"))
        return job, None, str(error)
