"""The numbered story of a verification: plan, look, calibrate, run, judge, report.

1  plan       what was asked for becomes cases                     plan.py
2  prepare    data files are read once, into shared memory         preparation.py
3  inspect    strategies, workloads and the machine are looked at  inspection.py
4  calibrate  reduction orders are confirmed on this machine       oracles/calibration.py
5  run        worlds train and record; judges compare              session.py, judge.py
6  report     checks become verdicts, verdicts a report            verdicts.py, reports/
"""

import atexit
import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distcheck import limits, plan, preparation, store, verdicts
from distcheck.datasets import SYNTHETIC
from distcheck.errors import DistcheckError, UsageError
from distcheck.plan import Request
from distcheck.records import Case, CaseReport, Report
from distcheck.session import CaseRun, Listener, Session
from distcheck.store import SavedCase, Store
from distcheck.worlds.pool import Pool


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a verification; carries the report on what had been judged by then."""

    def __init__(self, report: Report) -> None:
        super().__init__("interrupted")
        self.report = report


class Silent(Listener):
    """A listener that shows nothing."""

    def preparing(self, what: str) -> None:
        """Nothing."""

    def planned(self, cases: Sequence[Case]) -> None:
        """Nothing."""

    def progress(self, case: Case, what: str) -> None:
        """Nothing."""

    def finished(self, case: Case) -> None:
        """Nothing."""


def verify(
    strategy: str | os.PathLike[str] | Callable[..., Any] | Sequence[str],
    *,
    world: int | Sequence[int] = 4,
    workload: str | Sequence[str] = (),
    data: str = SYNTHETIC,
    data_dir: str | os.PathLike[str] | None = None,
    batch: int = 256,
    steps: int = 3,
    seed: int = 0,
    dtype: str | None = None,
    deadline_s: float = 30.0,
    save: str | os.PathLike[str] | None = None,
) -> Report:
    """Judges one or more gradient-sync strategies against single-node training.

    strategy    a registered name, "path/to/file.py:object", "pkg.mod:object", or a function or
                class that can be imported by its module and name
    world       number of ranks, or several to try
    workload    names of workloads; by default lattice and cnn
    batch       samples per step, over all ranks
    save        folder for cases, traces and the report; nothing is written without it

    Returns the report; `report.raise_for_verdict()` turns anything but a pass into an
    AssertionError. Raises UsageError for what makes no sense and CannotRunError for what this
    machine cannot run. Every call starts fresh ranks; only the helper that they are forked from
    is kept from one call to the next.
    """
    asked = {
        "strategies": _names(strategy),
        "worlds": (world,) if isinstance(world, int) else world,
        "workloads": (workload,) if isinstance(workload, str) else workload,
        "data": data,
        "data_dir": None if data_dir is None else os.fspath(data_dir),
        "batch": batch,
        "steps": steps,
        "seed": seed,
        "dtype": dtype,
        "deadline_s": deadline_s,
    }
    try:
        request = msgspec.convert(asked, Request)
    except msgspec.ValidationError as error:
        raise UsageError(f"verify() was given something else than it takes: {error}") from None
    cases = plan.plan_cases(request)
    keep = None if save is None else Store.at(Path(save))
    with _pool_lock:
        pool = _shared_pool()
        try:
            return run_cases(cases, pool=pool, keep=keep)
        except DistcheckError:
            raise
        except BaseException:
            pool.close()  # it may have been interrupted in the middle of a message
            raise


def run_cases(
    cases: Sequence[Case],
    *,
    pool: Pool,
    keep: Store | None = None,
    listener: Listener | None = None,
    download: bool = False,
) -> Report:
    """Runs and judges cases. Raises Interrupted, with what there is, on Ctrl-C."""
    listener = listener or Silent()
    listener.preparing("importing torch")
    pool.open()
    if keep is not None:
        for case in cases:
            keep.write_case(case)
    pool.wait_ready()
    data_name = next((c.data for c in cases if c.data != "lattice"), SYNTHETIC)
    listener.preparing(f"preparing data {data_name}")
    with preparation.prepared_data(pool, data_name, cases[0].data_dir, download=download) as data:
        listener.preparing("looking at strategies and workloads")
        facts = preparation.inspect(pool, cases, data)
        listener.preparing("calibrating reduction orders")
        runs = preparation.plan_runs(pool, cases, facts.cases, data)
        if keep is not None:
            keep.check_space(sum(limits.trace_bytes(run.case, run.layout) for run in runs))
        listener.planned(cases)
        book = _Book(pool, runs, facts.environment, keep)
        session = Session(pool, listener, description=data.description, data_fd=data.fd)
        try:
            session.run(runs, on_finished=book.enter)
        except KeyboardInterrupt:
            raise Interrupted(book.report(interrupted=True)) from None
        finally:
            for run in runs:
                run.close()
    return book.report(interrupted=False)


def recheck(folder: Path, *, pool: Pool, listener: Listener | None = None) -> Report:
    """Judges saved traces again; no rank is started. Raises UsageError for a damaged folder.

    On another machine, or with another torch, recorded bits are not the bits that are computed
    now: what fails there only by bits becomes unknown.
    """
    listener = listener or Silent()
    folders = store.saved_cases(folder)
    pool.wait_ready()
    first, fds = store.read_trace(pool, folders[0])
    for fd in fds:
        os.close(fd)
    case = first.case
    with preparation.prepared_data(pool, case.data, case.data_dir, download=False) as data:
        here = preparation.inspect(pool, [case], data).environment
        reports: list[CaseReport] = []
        session = Session(pool, listener, description=data.description, data_fd=data.fd)
        for place in folders:
            saved, fds = store.read_trace(pool, place)
            run = _run_of(saved, fds)
            try:
                session.rejudge(run)
            finally:
                run.close()
            report = verdicts.report_of(run, replay=f"distcheck recheck {shlex.quote(str(folder))}")
            reports.append(verdicts.allow_for_machine(report, saved.environment, here))
    return Report(environment=here, cases=tuple(reports), saved_to=str(folder))


class _Book:
    """Enters cases as they finish: their report, and what is kept of them."""

    def __init__(
        self,
        pool: Pool,
        runs: Sequence[CaseRun],
        environment: dict[str, Any],
        keep: Store | None,
    ) -> None:
        self._pool = pool
        self._runs, self._environment, self._keep = runs, environment, keep
        self._reports: dict[str, CaseReport] = {}
        self._save_error = ""

    def enter(self, run: CaseRun) -> None:
        """Takes a finished case; afterwards its traces may go."""
        report = verdicts.report_of(run, replay=self._replay(run.case))
        self._reports[run.case.id] = report
        if self._keep is None or self._save_error:
            return
        fds = [fd for fd in (run.trace_fd, run.rerun_fd) if fd >= 0]
        size = sum(store.stored_bytes(fd) for fd in fds)
        if not self._keep.wants_trace(size, failed=report.verdict == "fail"):
            return
        saved = SavedCase(
            case=run.case,
            facts=run.facts,
            planned=tuple(run.planned),
            layout=run.layout,
            outcomes=tuple(run.outcomes),
            rerun_outcomes=tuple(run.rerun_outcomes),
            notes=tuple(run.notes),
            environment=self._environment,
        )
        try:
            self._keep.write_trace(self._pool, saved, fds)
        except (OSError, DistcheckError) as error:
            self._note_failure(error)

    def report(self, *, interrupted: bool) -> Report:
        """The report over all cases; those that never finished are unknown."""
        cases = tuple(
            self._reports.get(run.case.id) or verdicts.report_of(run, replay=self._replay(run.case))
            for run in self._runs
        )
        report = Report(
            environment=self._environment,
            cases=cases,
            saved_to=str(self._keep.folder) if self._keep and not self._save_error else None,
            save_error=self._save_error,
            interrupted=interrupted,
        )
        return self._written(report) if self._keep and not self._save_error else report

    def _written(self, report: Report) -> Report:
        from distcheck.reports.json_report import render_json

        assert self._keep is not None
        try:
            self._keep.write_report(render_json(report))
        except OSError as error:
            self._note_failure(error)
            return self.report(interrupted=report.interrupted)
        return report

    def _note_failure(self, error: Exception) -> None:
        """What a person asked to save and is not saved is an error; our own keeping is not."""
        assert self._keep is not None
        if not self._keep.keep_everything:
            self._keep = None
            return
        what = getattr(error, "strerror", None) or error
        self._save_error = (
            f"the run could not be saved to {self._keep.folder} ({what}); "
            "the verdict above stands, free some space or save elsewhere"
        )

    def _replay(self, case: Case) -> str:
        if self._keep is not None:
            return f"distcheck replay {shlex.quote(str(self._keep.case_file(case)))}"
        words = ["distcheck", "verify", "--strategy", case.strategy, "--world", str(case.world)]
        words += ["--workload", case.workload, "--dtype", case.dtype, "--batch", str(case.batch)]
        words += ["--steps", str(case.steps), "--seed", str(case.seed)]
        words += ["--data", case.data] if case.data != "lattice" else []
        words += ["--data-dir", case.data_dir] if case.data_dir else []
        return shlex.join(words)


def _run_of(saved: SavedCase, fds: list[int]) -> CaseRun:
    run = CaseRun(saved.case, saved.facts, saved.facts.contract, list(saved.planned), saved.layout)
    run.trace_fd, run.rerun_fd = [*fds, -1, -1][:2]
    run.outcomes, run.rerun_outcomes = list(saved.outcomes), list(saved.rerun_outcomes)
    run.notes = list(saved.notes)
    return run


def _names(
    strategy: str | os.PathLike[str] | Callable[..., Any] | Sequence[str],
) -> tuple[str, ...]:
    if isinstance(strategy, str | os.PathLike):
        return (os.fspath(strategy),)
    if not callable(strategy):
        return tuple(strategy)
    module, name = getattr(strategy, "__module__", ""), getattr(strategy, "__qualname__", "")
    if not module or not name or "<" in name:
        raise UsageError(
            f"strategy {strategy!r} has no name that ranks could import it by; define it at the "
            'top level of a module, or give "path/to/file.py:object"'
        )
    if module == "__main__":  # a script: ranks import it by its file
        module = getattr(sys.modules[module], "__file__", "") or module
    return (f"{module}:{name}",)


_pool: Pool | None = None
_pool_lock = threading.Lock()


def _shared_pool() -> Pool:
    """The process's own pool; a forked child makes another."""
    global _pool
    if _pool is None or not _pool.usable:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool
