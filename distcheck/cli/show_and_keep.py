"""What the commands `verify`, `replay` and `recheck` do around a verification: show and keep."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console

from distcheck.cli.under_launchers import dismiss, front_pool
from distcheck.errors import CannotRunError, DistcheckError, ExitCode
from distcheck.errors.shown_text import say
from distcheck.explore.beside import explore_beside
from distcheck.plan.costs import rough_s
from distcheck.plan.provenance import Provenance
from distcheck.plan.thorough import NOTHING_BESIDE, Beside
from distcheck.records import Case, Report, RunPlan
from distcheck.reports.files import check_outputs, write_outputs
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for, render, summarize
from distcheck.store.run_folder import Store
from distcheck.store.saved_traces import saved_traces
from distcheck.store.trust import require_trust
from distcheck.verification.early_ends import GivenUpError, Interrupted
from distcheck.verification.rechecking import recheck
from distcheck.verification.run import run_cases
from distcheck.worlds.launchers.launch import Launch
from distcheck.worlds.pool import Pool


class Screen(Protocol):
    """Prints a report."""

    def __call__(
        self, report: Report, console: Console, *, verbose: bool = False, quiet: bool = False
    ) -> None:
        """As `distcheck.reports.terminal.render`."""


def verify_command(
    cases: Sequence[Case],
    *,
    save: str | None,
    digests: bool = False,
    files: Mapping[str, str],
    verbose: bool,
    quiet: bool,
    download: bool = False,
    launch: Launch | None = None,
    made: Mapping[str, Provenance] | None = None,
    whole: RunPlan | None = None,
    beside: Beside = NOTHING_BESIDE,
    show: Screen = render,
) -> int:
    """Runs cases, `whole` or a part of it, and searches `beside` them, and shows the report;
    returns the exit code. `digests`: what is saved holds digests in place of tensors. `show` prints
    the report.
    """
    check_outputs(files)
    keep = Store.by_default() if save is None else Store.at(Path(save), launch, tensors=not digests)

    def run(pool: Pool, listener: LiveProgress) -> Report:
        return run_cases(
            cases,
            pool=pool,
            keep=keep,
            listener=listener,
            download=download,
            made=made,
            whole=whole,
            follow_up=True,
            beside=beside,
            explore=explore_beside,
        )

    try:
        pool = front_pool(launch, cases)
        return _show(run, pool, files=files, verbose=verbose, quiet=quiet, screen=show)
    except BaseException:
        if keep is not None:
            keep.discard_if_unused()
        raise


def recheck_command(
    folder: str, *, files: Mapping[str, str], trusted: bool, verbose: bool, quiet: bool
) -> int:
    """Judges a saved run again and shows the report; returns the exit code."""
    check_outputs(files)
    traces = saved_traces(Path(folder))
    cases = [trace.saved.case for trace in traces]
    require_trust(folder, cases, doing="rechecking", trusted=trusted)

    def run(pool: Pool, listener: LiveProgress) -> Report:
        return recheck(Path(folder), traces, pool=pool, listener=listener)

    return _show(run, Pool(), files=files, verbose=verbose, quiet=quiet)


def _show(
    run: Callable[[Pool, LiveProgress], Report],
    pool: Pool,
    *,
    files: Mapping[str, str],
    verbose: bool,
    quiet: bool,
    screen: Screen = render,
) -> int:
    try:
        with LiveProgress(Console(stderr=True, quiet=quiet), cost=rough_s) as listener:
            report = run(pool, listener)
    except Interrupted as interruption:
        report = interruption.report
        dismiss(pool, int(report.exit_code), "interrupted")
    except GivenUpError as loss:
        report = loss.report
        dismiss(pool, int(report.exit_code), report.given_up)
    except DistcheckError as error:
        dismiss(pool, int(error.exit_code), str(error))
        raise
    except BaseException:
        dismiss(pool, int(ExitCode.INTERRUPTED), "interrupted")
        raise
    else:
        dismiss(pool, int(report.exit_code), summarize(report))
    finally:
        pool.close()
    unwritten = _written(report, files, verbose=verbose, quiet=quiet, screen=screen)
    if report.interrupted:
        judged = sum(not case.unfinished for case in report.cases)
        click.echo(
            f"distcheck: interrupted after {judged} of {len(report.cases)} cases; "
            "nothing is left running",
            err=True,
        )
    elif report.given_up:
        judged = sum(not case.unfinished for case in report.cases)
        say(
            f"distcheck: {report.given_up}; {judged} of {len(report.cases)} cases were judged",
            err=True,
        )
    elif report.save_error:
        say(
            f"distcheck: {report.save_error}; the verdict above stands; free some space or save "
            "elsewhere",
            err=True,
        )
    for problem in unwritten:
        say(f"distcheck: warning: {problem}; the verdict stands", err=True)
    if unwritten and report.exit_code == ExitCode.PASS:
        return int(ExitCode.CANNOT_RUN)
    return int(report.exit_code)


def _written(
    report: Report, files: Mapping[str, str], *, verbose: bool, quiet: bool, screen: Screen
) -> list[str]:
    """Shows the report and writes its files; returns what could not be written. A verdict does not
    change by that: a failure stays a failure on a full disk.
    """
    problems = []
    ended_early = bool(report.interrupted or report.given_up) and not report.environment
    if "-" not in files.values() and not ended_early:
        screen(report, console_for(), verbose=verbose, quiet=quiet)
    for name, path in files.items():
        try:
            write_outputs({name: path}, report)
        except CannotRunError as error:
            problems.append(str(error))
    return problems
