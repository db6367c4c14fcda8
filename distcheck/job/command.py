"""Implementation of `distcheck job`: runs the command, reads the recording, judges it,
and reports.
"""

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
    twice,
)
from distcheck.job.by_module import diagnose_modules, needs_diagnosis
from distcheck.job.checks.averaging import averaging
from distcheck.job.copying import ProjectCopy, copy_project
from distcheck.job.inside.joining import joined
from distcheck.job.judging import case_of_command, judge
from distcheck.job.machines import GatheredMachines
from distcheck.job.options import JobOptions, script_of
from distcheck.job.replaying import NoReferenceError, Reference
from distcheck.job.resuming import Earlier
from distcheck.job.running import CommandResult
from distcheck.job.settings import JobSettings
from distcheck.judge.diagnosis import outcomes
from distcheck.judge.divergence.noise_floor import NoiseFloor
from distcheck.judge.divergence.noise_floor import write_noise_floor as write_noise_floor
from distcheck.machine.resources import keep_freed_memory
from distcheck.plan.provenance import Provenance
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import REPORT, JobRecording
from distcheck.records import CaseReport, CheckResult, Compared, Report
from distcheck.records.layers import NO_LAYER
from distcheck.records.run_facts import Origin
from distcheck.reports.json_report import render_json
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import summarize
from distcheck.store.origin import origin_here
from distcheck.store.run_folder import RunStore

_NOT_SHOWN = (
    "steps before and after the recorded ones",
    "other world sizes, other seeds, other hardware",
    "evaluation, checkpoints and metrics",
)


def judge_job(asked: JobOptions, live: LiveProgress) -> Report:
    """Run and judge the job. Raises the errors of `running.check_recorded`."""
    command = running.command_of(asked.words, asked.nproc)
    if asked.save is not None and Path(asked.save).exists():
        raise UsageError(f"--save {asked.save} already exists; pass the name of a new folder")
    earlier = resuming.read(Path(asked.resumed_from)) if asked.resumed_from is not None else None
    with leftovers.folder() as folder:
        made = origin_here()
        recorded, copy = folder / "recording", folder / "copy"
        private.folder(recorded, is_new=True)
        missing = _why_none(asked)
        needs_copy = asked.save is not None or asked.twice or not missing
        copied = copy_project(copy) if needs_copy else ProjectCopy(Path.cwd(), copy, missing)
        file = settings.write(_settings_of(asked), recorded)
        live.phase(f"[1/3] recording {asked.steps} steps of the job")
        # torchrun sets this when ranks share a machine, and prints four lines about it.
        threads = {"OMP_NUM_THREADS": "1"} if (asked.nproc or 0) > 1 else {}
        ran = running.run(command, file, deadline_s=asked.deadline_s, defaults=threads)
        if ran.hung:
            return _store_report(_report(made, _hung(asked, ran)))
        running.check_recorded(recorded, ran, command, on_cpu=asked.on_cpu)
        keep_freed_memory()
        with machines.gather_recording(recorded, ran) as whole:
            with live:
                report, job, noise_floor = _judge_recording(
                    asked, whole, copied, folder, live, earlier
                )
                report = msgspec.structs.replace(report, made=made)
            whole.tell(int(report.exit_code), summarize(report))
        report = _store_report(report)
        if asked.save is not None:
            try:
                reading.save_recording(job, Path(asked.save))
                write_noise_floor(noise_floor, Path(asked.save))
                private.write(Path(asked.save, REPORT), render_json(report))
            except (CannotRunError, OSError) as error:  # the verdict is unaffected
                return msgspec.structs.replace(report, save_error=str(error))
            return msgspec.structs.replace(report, saved_to=asked.save)
        return report


def _judge_recording(
    asked: JobOptions,
    whole: GatheredMachines,
    copied: ProjectCopy,
    folder: Path,
    live: LiveProgress,
    earlier: Earlier | None,
) -> tuple[Report, JobRecording, NoiseFloor]:
    """Return the report on a complete recording, the recording as judged, and its noise floor."""
    missing = _why_none(asked) or copied.missing
    job = perturbed_runs.read_whole(folder / "recording", folder / "whole", asked.mesh)
    own_steps = averaging(job)
    if own_steps is None:
        job = dataclasses.replace(job, steps=job.steps[: asked.steps])
    missing = missing or ("" if own_steps is None else own_steps.reason)
    reference, noise_floor = None, NoiseFloor()
    own_settings = _settings_of(asked)
    if asked.save is not None and whole.hosts:
        noise_floor = NoiseFloor(why="the job runs on several machines and was not rerun")
    elif asked.save is not None:
        live.phase("[1/3] measuring the noise floor: two reruns with parameters perturbed by 1 ULP")
        noise_floor = perturbed_runs.measured(
            job, own_settings, running.command_of(asked.words, asked.nproc), copied,
            folder / "moved", deadline_s=asked.deadline_s,
        )  # fmt: skip
    if asked.twice:
        case = twice.judge(asked, own_settings, job, whole, copied, folder / "twice", live)
        return _report(None, case), job, noise_floor
    if not missing:
        live.phase("[2/3] replaying them in a single process")
        job, reference, missing = _replay(asked, job, copied, folder / "reference")
    live.phase("[3/3] judging")
    case = judge(asked, job, whole.ran, reference, missing)
    if reference is not None and not whole.hosts and needs_diagnosis(case):
        live.phase("[3/3] rerunning to record its modules")
        case = diagnose_modules(case, job, asked, own_settings, copied, folder / "again")
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


def _store_report(report: Report) -> Report:
    """Store the report (without the recording) among the saved runs, if possible."""
    store = RunStore.default_or_none()
    if store is not None:
        with contextlib.suppress(OSError):
            store.write_case(report.cases[0].case, Provenance(environment={}))
            store.write_report(render_json(report))
            return msgspec.structs.replace(report, saved_to=str(store.folder))
    return report


def _hung(asked: JobOptions, ran: CommandResult) -> CaseReport:
    """Report a job that hung. Nothing else of the job is judged."""
    made = [one.step for one in ran.hung if one.step is not None]
    where = f"after step {max(made)}" if made else "before its first step"
    check = CheckResult(
        check="outcome", layer=NO_LAYER, verdict="fail", compared=Compared(ranks=len(ran.hung)),
        reason=f"the job hangs {where} and was terminated",
    )  # fmt: skip
    case = case_of_command(asked, script=script_of(asked.words), world=len(ran.hung))
    return CaseReport(
        case=case, strategy_file=script_of(asked.words), verdict="fail", outcomes=ran.hung,
        checks=(check,), diagnosis=tuple(outcomes.explain(ran.hung)), replay=case.command_line,
    )  # fmt: skip


def _settings_of(asked: JobOptions) -> JobSettings:
    kept = asked.save is not None or asked.resumed_from is not None or asked.twice
    return msgspec.structs.replace(asked, kept=kept, modules=asked.modules or asked.ops)


def _why_none(asked: JobOptions) -> str:
    if asked.resumed_from is not None:
        return "it is compared with the job that it resumes"
    if asked.no_reference or asked.twice:
        return "--no-reference was given"
    return "the reference starts at step 0, but --from-step was given" if asked.from_step else ""


def _replay(
    asked: JobOptions, job: JobRecording, copy: ProjectCopy, folder: Path, own_inputs: str = ""
) -> tuple[JobRecording, Reference | None, str]:
    """Return the job in the form that is compared, and the reference or the reason why there is
    none.
    """
    if job.processes == 1 or not job.steps or job.divided_by:
        return job, None, "there is nothing to compare with"
    if any(len(replica) > 1 for replica in job.replicas) and any(
        one.draws and one.live for record in job.records.values() for one in record.passes
    ):
        missing = (
            "ranks that share a model draw random numbers in forward passes for their own "
            "shards, but a single process draws them for all; set dropout to 0 for this check"
        )
        return job, None, missing
    private.folder(folder, is_new=True)
    try:
        return job, replaying.replay(
            job, copy, folder, on_cpu=asked.on_cpu, weights=asked.weights,
            command=asked.reference or "", deadline_s=asked.deadline_s,
            modules=asked.modules or asked.ops, own_inputs=own_inputs,
        ), ""  # fmt: skip
    except NoReferenceError as error:
        if error.retry == "joined" and not job.joined:
            return _replay(asked, joined(job), copy, folder.with_name(f"{folder.name}-joined"))
        if error.retry == "own inputs" and not own_inputs:
            again = folder.with_name(f"{folder.name}-own")
            return _replay(asked, job, copy, again, own_inputs=str(error))
        more = f"; with its own inputs: {error}" if own_inputs else ""
        return job, None, (own_inputs or str(error)) + more
