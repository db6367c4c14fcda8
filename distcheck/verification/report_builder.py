"""Builds the report: adds each case result as it finishes, and saves it. Also builds partial
reports of runs that end before every case is judged.
"""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from distcheck.errors import DistcheckError, HelperError, InternalError, RankLostError
from distcheck.plan.provenance import Provenance, case_hmac
from distcheck.records import Case, CaseReport, ChangesSinceLastPass, Origin, Report, RunPlan
from distcheck.records.run_facts import ExploredSearch
from distcheck.store import run_folder as store
from distcheck.store.earlier_runs import changes_since_last_pass
from distcheck.store.run_folder import RunStore, SavedCase
from distcheck.verification import followups, verdicts
from distcheck.verification.case_run import CaseRun
from distcheck.verification.contents import not_shown, with_remarks
from distcheck.verification.followups import FollowUp
from distcheck.verification.session import NOT_FINISHED
from distcheck.worlds.pool import Pool

# Fields that a saved case and a running one have in common.
_SAVED = (
    "case", "facts", "planned", "layout", "outcomes", "rerun_outcomes", "rerun_in", "surroundings",
    "separation", "notes", "ledger",
)  # fmt: skip


class ReportBuilder:
    """Collects cases as they finish: builds their reports and saves them."""

    def __init__(
        self,
        pool: Pool,
        runs: Sequence[CaseRun],
        made: Mapping[str, Provenance],
        environment: dict[str, Any],
        keep: RunStore | None,
        earlier: dict[str, CaseReport],
    ) -> None:
        self._pool, self._made = pool, made
        self._runs, self._environment, self._keep = runs, environment, keep
        self._earlier = tuple(
            msgspec.structs.replace(report, notes=(*report.notes, "judged before a restart"))
            for report in earlier.values()
        )
        self._reports: dict[str, CaseReport] = {}
        self._save_error = ""
        self.plan: RunPlan | None = None
        self.left_out: dict[str, str] = {}
        self.unknown: list[CaseReport] = []  # cases that could not be judged
        self.settles = False
        self.made: Origin | None = None
        self.explored: list[ExploredSearch] = []
        self._found: list[CaseReport] = []

    @property
    def finished(self) -> list[CaseReport]:
        return list(self._reports.values())

    def change(self, runs: Sequence[CaseRun]) -> None:
        """Replace planned cases by cases with the same ids that run differently."""
        changed = {run.case.id: run for run in runs}
        self._runs = [changed.get(run.case.id, run) for run in self._runs]
        for run in runs:
            if self._keep is not None:
                self._keep.write_case(run.case, self._made.get(run.case.id))

    def report_of(self, run: CaseRun) -> CaseReport | None:
        """Return a finished case's report before it is entered; None if it may be unfinished."""
        report = verdicts.build_case_report(run, replay="")
        return None if self.settles and followups.is_untrained(report) else report

    def replace(self, run: CaseRun) -> None:
        """Enter a changed case that ran again, in place of the first run with its id."""
        if self._keep is not None:
            self._keep.write_case(run.case, self._made.get(run.case.id))
        self.enter(run)

    def add_follow_ups(self, done: Sequence[tuple[FollowUp, CaseReport]]) -> None:
        for report in followups.amend_report(self.finished, done):
            if report != self._reports[report.case.id]:
                self.amend(report)

    def amend(self, report: CaseReport) -> None:
        self._reports[report.case.id] = report
        self._note_finished(report)

    @property
    def reasons_not_counted(self) -> dict[str, str]:
        """Return the ids of cases that ran but do not count, with reasons."""
        return followups.leave_out_cases(self.finished)[1] if self.settles else {}

    def add_search(self, explored: ExploredSearch, found: Sequence[CaseReport]) -> None:
        """Add the coverage of a search, and the cases that it found."""
        self.explored.append(explored)
        self._found += found

    def enter(self, run: CaseRun) -> str:
        """Enter a finished case; return its verdict, or NOT_FINISHED. The traces of the case may be
        freed afterward. If a rank refused to run, raises the rank's error.
        """
        if run.refused is not None:
            raise run.refused
        report = verdicts.build_case_report(run, replay=self._replay(run.case))
        self._reports[run.case.id] = report
        if self._keep is not None and not self._save_error and not run.not_run:
            self._save(run, report)
        if self.settles and followups.is_untrained(report):
            return NOT_FINISHED
        return report.verdict

    def stands(self, case: Case) -> bool:
        """Return True if a finished case has failed and no follow-up can change that."""
        return followups.failure_stands(self._reports[case.id])

    def _save(self, run: CaseRun, report: CaseReport) -> None:
        assert self._keep is not None
        fds = [run.traces[what] for what in ("world", "rerun") if what in run.traces]
        size = sum(store.stored_bytes(fd) for fd in fds)
        try:
            if self._keep.wants_trace(size, failed=report.verdict == "fail"):
                self._keep.write_trace(self._pool, self._saved(run), fds)
        except (OSError, DistcheckError) as error:
            self._note_failure(error)
        else:  # last: a finished case is neither run nor saved again
            self._note_finished(report)

    def _note_finished(self, report: CaseReport) -> None:
        if self._keep is None or self._save_error:
            return
        try:
            self._keep.write_finished(report, self._made.get(report.case.id))
        except (OSError, DistcheckError) as error:
            self._note_failure(error)

    def _saved(self, run: CaseRun) -> SavedCase:
        digests = self._made[run.case.id].digests
        return SavedCase(
            **{name: getattr(run, name) for name in _SAVED},
            defect=("", "") if run.defect is None else (str(run.defect), run.defect.traceback),
            environment=self._environment,
            digests=digests,
            seal=case_hmac(run.case, digests),
        )

    def report(
        self,
        *,
        interrupted: bool = False,
        given_up: DistcheckError | None = None,
    ) -> Report:
        """Return the report so far; `given_up` is the error that ended the run early."""
        cases = tuple(
            self._reports.get(run.case.id) or self._unfinished(run, given_up) for run in self._runs
        )
        counted: list[CaseReport] = [*self._earlier, *cases]
        out: dict[str, str] = {}
        if self.settles and given_up is None:
            counted, out = followups.leave_out_cases(counted)
        counted = with_remarks(counted)
        report = Report(
            environment=self._environment,
            cases=(*counted, *self._found, *self.unknown),
            explored=tuple(self.explored),
            made=self.made,
            not_shown=not_shown(counted),
            plan=self.plan,
            left_out={**self.left_out, **out},
            since_green=self._since_green(),
            saved_to=str(self._keep.folder) if self._keep and not self._save_error else None,
            save_error=self._save_error,
            interrupted=interrupted,
        )
        if given_up is not None:
            report = abandoned_report(report, given_up)
        return self._written(report) if self._keep and not self._save_error else report

    def _unfinished(self, run: CaseRun, given_up: DistcheckError | None) -> CaseReport:
        run.cut_short()
        if given_up is not None:
            run.notes += (str(given_up),)
        report = verdicts.build_case_report(run, replay=self._replay(run.case))
        # A failure is known, even if later parts were not judged.
        return msgspec.structs.replace(report, unfinished=report.verdict != "fail")

    def _since_green(self) -> ChangesSinceLastPass | None:
        if self._keep is None:
            return None
        cases = [run.case for run in self._runs]
        return changes_since_last_pass(store.DEFAULT_FOLDER / "runs", cases, self._made)

    def _written(self, report: Report) -> Report:
        from distcheck.reports.json_report import render_json

        assert self._keep is not None
        try:
            self._keep.write_report(render_json(report))
        except OSError as error:
            self._note_failure(error)
            return msgspec.structs.replace(report, saved_to=None, save_error=self._save_error)
        return report

    def _note_failure(self, error: Exception) -> None:
        """Record a failed save: an error if the user asked for it, else saving stops silently."""
        assert self._keep is not None
        if not self._keep.keep_everything:
            self._keep = None
            return
        what = getattr(error, "strerror", None) or error
        self._save_error = f"the run could not be saved to {self._keep.folder} ({what})"

    def _replay(self, case: Case) -> str:
        if self._keep is not None:
            return f"distcheck replay {shlex.quote(str(self._keep.case_file(case)))}"
        return case.command_line


def abandoned_report(report: Report, error: DistcheckError) -> Report:
    """Return a report with the reason that the run ended before every case was judged."""
    return msgspec.structs.replace(report, given_up=str(error), given_up_as=error.exit_code)


def restore_run(saved: SavedCase, fds: Sequence[int]) -> CaseRun:
    """Restore a saved case to the state after its final world. It closes `fds`, its traces."""
    return CaseRun(
        **{name: getattr(saved, name) for name in _SAVED},
        traces=dict(zip(("world", "rerun"), fds, strict=False)),
        defect=InternalError(*saved.defect) if saved.defect[0] else None,
    )


class Interrupted(KeyboardInterrupt):
    """Raised for Ctrl-C during a verification; carries the report so far."""

    def __init__(self, report: Report) -> None:
        super().__init__("interrupted")
        self.report = report


class GivenUpError(HelperError):
    """Raised if the run lost a process that it needs; carries the report so far."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.given_up)
        self.report = report
        self.exit_code = report.given_up_as


@contextlib.contextmanager
def attach_report(builder: ReportBuilder) -> Iterator[None]:
    """Attach the report so far to exceptions that end the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(builder.report(interrupted=True)) from None
    except (HelperError, RankLostError) as error:
        raise GivenUpError(builder.report(given_up=error)) from error


def report_without_results(
    cases: Sequence[Case],
    reason: str,
    whole: RunPlan | None,
    origin: Origin,
    *,
    unfinished: bool = False,
) -> Report:
    """Return the report of a run that ended before any rank started."""
    unknown = [
        CaseReport(
            case=case,
            strategy_file="",
            verdict="unknown",
            outcomes=(),
            checks=(),
            notes=(reason,),
            unfinished=unfinished,
        )
        for case in cases
    ]
    return Report(environment={}, cases=tuple(unknown), plan=whole, made=origin)
