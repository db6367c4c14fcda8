"""Implementation of `distcheck job --guard`: runs the command to its end while its ranks compare
replicas.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distcheck.errors import DistcheckError, ExitCode, UsageError
from distcheck.job import accepting, leftovers, running, settings
from distcheck.job.guard import explaining, records
from distcheck.job.guard.records import GuardProgress
from distcheck.job.options import CommandOptions, job_case, script_of
from distcheck.job.running import CommandResult
from distcheck.job.settings import JobSettings
from distcheck.judge.diagnosis.communication import warn_of_ledger
from distcheck.records import (
    Case,
    CaseReport,
    CheckResult,
    Compared,
    Diagnosis,
    Report,
    merge_verdicts,
)
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import NO_LAYER
from distcheck.records.ledger import relative
from distcheck.store.origin import origin_here

FOLDER = ".distcheck/guard"
_ALIKE = "errors that are identical on all ranks: replicas can agree on a wrong model"
_AUDITED = (
    "errors that are identical on all ranks before backward has finished",
    "a common factor of all gradients",
)
_NOT_SHOWN = (
    "differences that appeared between two checks and disappeared again",
    "models that no optimizer updates, such as averages (EMA)",
)


class GuardOptions(CommandOptions, frozen=True, kw_only=True):
    """The user's options for a guard."""

    save: str | None = None

    def __post_init__(self) -> None:
        accepting.check_kinds(self.accept, guards=True)
        if self.every < 1:
            raise UsageError("--every must be at least 1")


def guard_job(asked: GuardOptions) -> tuple[Report, int]:
    """Run the job to its end. Return the report and the exit code, which is that of the command if
    ranks agreed and the command failed.
    """
    command = running.command_of(asked.words, asked.nproc)
    bundles = Path(asked.save or FOLDER).absolute()
    with leftovers.folder() as folder:
        made = origin_here()
        randomness = accepting.RANDOMNESS not in asked.accept
        given = msgspec.structs.replace(
            asked, mode="guard", bundles=str(bundles), randomness=randomness
        )
        ran = running.run(command, settings.write(given, folder))
        found = _read(folder)
        if not found or (folder / "defect").exists():
            running.check_recorded(folder, ran, command)
    case = _judge(asked, found, ran)
    not_checked = tuple(accepting.KINDS[kind][1] for kind in asked.accept)
    not_checked += _AUDITED if asked.audit else (_ALIKE,)
    report = Report(environment={}, cases=(case,), made=made, not_shown=(*not_checked, *_NOT_SHOWN))
    differs = any(check.verdict == "fail" for check in case.checks if check.check != "outcome")
    code = report.exit_code
    if differs:
        return report, int(ExitCode.MISMATCH)
    return report, ran.code if ran.code and code != ExitCode.INTERNAL else int(code)


def _read(folder: Path) -> list[GuardProgress]:
    try:
        return [records.read_guard_progress(file) for file in sorted(folder.glob("guard-*.json"))]
    except (OSError, msgspec.MsgspecError) as error:
        raise DistcheckError(
            f"the guard's record is damaged ({error}); run the job again"
        ) from error


def _judge(asked: GuardOptions, found: Sequence[GuardProgress], ran: CommandResult) -> CaseReport:
    world = max(one.world for one in found)
    first = next((one for one in found if one.first), None)
    # Ranks that the guard stopped did not fail.
    outcomes = (CommandResult(0, ()) if first is not None else ran).outcomes(world)
    check = _agreement(found, world, first)
    ended = all(one.outcome is RankEnd.FINISHED for one in outcomes)
    of_ends = CheckResult(
        check="outcome", layer=NO_LAYER, verdict="pass" if ended else "fail",
        compared=Compared(ranks=world, steps=max(one.steps for one in found)),
    )  # fmt: skip
    remarks = dict.fromkeys(f"guard: {text}" for one in found for text in one.remarks)
    case = _case_of(asked, world, max(one.steps for one in found))
    ledger = next((relative(one.ledger) for one in found if one.ledger), None)
    return CaseReport(
        case=case,
        strategy_file=script_of(asked.words),
        verdict=merge_verdicts([of_ends.verdict, check.verdict]),
        outcomes=outcomes,
        checks=(of_ends, check),
        diagnosis=tuple(_causes(first)),
        remarks=tuple(warn_of_ledger(ledger)),
        ledger=ledger,
        replay=f"distcheck explain {first.file}" if first and first.file else case.command_line,
        notes=tuple(remarks),
    )


def _agreement(
    found: Sequence[GuardProgress], world: int, first: GuardProgress | None
) -> CheckResult:
    """Return the check that all ranks agreed; unknown if nothing was compared."""
    checks, tensors = max(one.checks for one in found), max(one.compared for one in found)
    verdict, reason = "pass", f"{checks} checks of {tensors} tensors"
    if first is not None:
        verdict, reason = "fail", first.first.replace("\n", "; ")
    elif world == 1:
        verdict = "unknown"
        reason = "the job has only one rank, so nothing is compared; start at least 2"
    elif not checks or not tensors:
        steps = max(one.steps for one in found)
        verdict = "unknown"
        reason = f"no tensor was compared in {steps} steps; pass a smaller --every"
    elif late := [one for one in found if one.checked_at < one.steps]:
        verdict = "unknown"
        reason = (
            f"the last check was after step {late[0].checked_at} of {late[0].steps}; call "
            "destroy_process_group() at the end, or pass a smaller --every"
        )
    return CheckResult(
        check="agreement",
        layer=NO_LAYER,
        verdict=verdict,  # type: ignore[arg-type]
        compared=Compared(tensors=tensors, elements=tensors * checks, ranks=world, steps=checks),
        reason=reason,
    )


def _causes(first: GuardProgress | None) -> list[Diagnosis]:
    """Return the causes in the bundle, if it can be read (it may be on another machine)."""
    if first is None or not first.file:
        return []
    with contextlib.suppress(UsageError):
        return explaining.causes(records.read(Path(first.file)))
    return []


def _case_of(asked: GuardOptions, world: int, steps: int) -> Case:
    options = ["--guard"]
    options += ["--every", str(asked.every)] if asked.every != JobSettings().every else []
    options += [*["--warn"] * asked.warns, *["--audit"] * asked.audit]
    about = {"id": "guard", "steps": steps, "layers": ()}
    return job_case(asked, options, script=script_of(asked.words), world=world, **about)
