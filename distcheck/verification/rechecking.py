"""`distcheck recheck`: judges the traces of a saved run again. Starts no rank."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from distcheck.errors import UsageError
from distcheck.plan.cases import FALLS_BACK, plan_checks
from distcheck.records import Case, CaseReport, Report
from distcheck.records.case import is_file_name
from distcheck.reports.documents import read_report
from distcheck.store import run_folder as store
from distcheck.store.origin import origin_here
from distcheck.store.run_folder import SavedTrace, read_trace, require_tensors
from distcheck.verification import preparation, verdicts
from distcheck.verification.case_run import CaseRun
from distcheck.verification.contents import not_shown
from distcheck.verification.report_builder import report_without_results, restore_run
from distcheck.verification.session import Listener, Session, SilentListener
from distcheck.worlds.pool import Pool


def recheck(
    folder: Path, traces: Sequence[SavedTrace], *, pool: Pool, listener: Listener | None = None
) -> Report:
    """Judge the traces of a saved run again, without starting a rank.

    On a different machine, or with a different torch, recorded bits may differ from bits computed
    here. A failure against computed bits then becomes unknown. Raises UsageError for a damaged
    folder, and for one whose report contradicts it, as after cases were removed.
    """
    listener, origin = listener or SilentListener(), origin_here()
    lost = failed_without_trace(folder, {trace.folder.name for trace in traces})
    for trace in traces:
        require_tensors(trace)
        _check_planned(trace)
    pool.wait_ready()
    case = traces[0].saved.case
    with preparation.load_shared_dataset(pool, case.data, case.data_dir, download=False) as data:
        here = preparation.inspect(pool, [case], data).environment
        reports: list[CaseReport] = []
        session = Session(pool, data, listener)
        listener.planned([trace.saved.case for trace in traces])
        for trace in traces:
            saved, fds = trace.saved, read_trace(pool, trace)
            elsewhere = verdicts.machine_differences(saved.environment, here)

            def enter(run: CaseRun, elsewhere: str = elsewhere) -> str:
                replay = f"distcheck recheck {shlex.quote(str(folder))}"
                reports.append(verdicts.build_case_report(run, replay=replay, elsewhere=elsewhere))
                return reports[-1].verdict

            session.rejudge(restore_run(saved, fds), on_finished=enter)
    why = "not judged: it failed when it ran, and this folder does not have its trace"
    reports += report_without_results(lost, why, None, origin).cases
    shown = not_shown(reports)
    return Report(
        environment=here,
        cases=tuple(reports),
        made=origin,
        not_shown=shown,
        saved_to=str(folder),
    )


def _check_planned(trace: SavedTrace) -> None:
    """Raise UsageError if a saved case lacks checks that it needs, or their data."""
    saved = trace.saved
    there = {(p.check, p.layer, p.scope, p.required) for p in saved.planned}
    fallen = "; ".join(p.note for p in saved.planned if FALLS_BACK in p.note)  # shown to the user
    try:
        sizes = preparation.samples_per_rank(saved.case, saved.facts)
        needed = plan_checks(saved.case, saved.facts, sizes=sizes, calibration_failure=fallen)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"the trace in {trace.folder} is damaged: {error}") from error
    for planned in needed:
        if (planned.check, planned.layer, planned.scope, planned.required) not in there:
            raise UsageError(
                f"the trace in {trace.folder} does not have the tensors that its case needs for "
                "the check "
                f"{planned.check!r}: it was edited, or a different version saved it; record the "
                "run again"
            )


def failed_without_trace(folder: Path, there: Collection[str]) -> list[Case]:
    """Return the planned cases that failed by a run's report, but have no trace in `there`: it was
    too large to keep, or was removed. Raises UsageError for a damaged report or case.
    """
    written = folder / "report.json"
    said = read_report(written) if written.exists() else {"cases": []}
    planned = {cell["id"] for cell in (said.get("plan") or {"cases": []})["cases"]}
    failed = [case["case"]["id"] for case in said["cases"] if case["verdict"] == "fail"]
    lost = [name for name in failed if name in planned - set(there) and is_file_name(name)]
    return [store.read_case(folder / "cases" / f"{name}.json") for name in lost]
