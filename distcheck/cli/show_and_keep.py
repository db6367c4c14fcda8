"""Shows and saves a verification, for `verify`, `replay` and `recheck`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console

from distcheck.cli.under_launchers import end_other_processes, pool_for_launch
from distcheck.errors import CannotRunError, DistcheckError, ExitCode
from distcheck.errors.shown_text import print_displayable
from distcheck.plan.costs import estimated_s
from distcheck.records import Case, Report
from distcheck.reports.files import check_outputs, write_outputs
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for, render, summarize
from distcheck.store.run_folder import RunStore
from distcheck.verification.report_builder import GivenUpError, Interrupted
from distcheck.verification.run import RunOptions, run_cases
from distcheck.worlds.launchers import Launch
from distcheck.worlds.pool import Pool


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Selects the outputs of a report: on the screen (`screen`), and files by the name of their
    format.
    """

    files: Mapping[str, str]
    verbose: bool
    quiet: bool
    screen: Callable[..., None] = render


def verify_command(
    cases: Sequence[Case],
    options: RunOptions,
    showing: OutputOptions,
    *,
    save: str | None,
    digests: bool = False,
    launch: Launch | None = None,
    pool: Pool | None = None,
    progress: type[LiveProgress] = LiveProgress,
) -> int:
    """Run cases and searches, and show the report. Return the exit code. With `digests`, saved
    traces contain digests instead of tensors. If `pool` is given, it stays open.
    """
    check_outputs(showing.files)
    keep = (
        RunStore.default_or_none()
        if save is None
        else RunStore.at(Path(save), launch, tensors=not digests)
    )
    options = replace(options, keep=keep, follow_up=True)
    try:
        used = pool or pool_for_launch(launch, cases)
        return show_run(
            lambda listener: run_cases(cases, used, replace(options, listener=listener)),
            used,
            showing,
            progress=progress,
            pool_stays=pool is not None,
        )
    except BaseException:
        if keep is not None:
            keep.discard_if_unused()
        raise


def show_run(
    run: Callable[[LiveProgress], Report],
    pool: Pool,
    showing: OutputOptions,
    *,
    progress: type[LiveProgress] = LiveProgress,
    pool_stays: bool = False,
) -> int:
    """Show the progress of a run on a pool, then its report. Return the exit code. The pool is
    closed, unless `pool_stays` is set and nothing interrupted the run.
    """
    stays = False
    try:
        with progress(Console(stderr=True, quiet=showing.quiet), cost=estimated_s) as listener:
            report = run(listener)
    except Interrupted as interruption:
        report = interruption.report
        end_other_processes(pool, int(report.exit_code), "interrupted")
    except GivenUpError as loss:
        report = loss.report
        end_other_processes(pool, int(report.exit_code), report.given_up)
    except DistcheckError as error:
        end_other_processes(pool, int(error.exit_code), str(error))
        stays = pool_stays
        raise
    except BaseException:
        end_other_processes(pool, int(ExitCode.INTERRUPTED), "interrupted")
        raise
    else:
        end_other_processes(pool, int(report.exit_code), summarize(report))
        stays = pool_stays
    finally:
        if not stays:
            pool.close()
    unwritten = _show_and_write(report, showing)
    if report.interrupted:
        judged = sum(not case.unfinished for case in report.cases)
        click.echo(
            f"distcheck: interrupted after {judged} of {len(report.cases)} cases; "
            "nothing is left running",
            err=True,
        )
    elif report.given_up:
        judged = sum(not case.unfinished for case in report.cases)
        print_displayable(
            f"distcheck: {report.given_up}; {judged} of {len(report.cases)} cases were judged",
            err=True,
        )
    elif report.save_error:
        print_displayable(
            f"distcheck: {report.save_error}; the verdict above is unaffected; free some space "
            "or save elsewhere",
            err=True,
        )
    for problem in unwritten:
        print_displayable(f"distcheck: warning: {problem}; the verdict is unaffected", err=True)
    if unwritten and report.exit_code == ExitCode.PASS:
        return int(ExitCode.CANNOT_RUN)
    return int(report.exit_code)


def _show_and_write(report: Report, showing: OutputOptions) -> list[str]:
    """Show the report and write its files. Return error messages. They do not change the verdict: a
    failure stays a failure even if the disk is full.
    """
    problems = []
    ended_early = bool(report.interrupted or report.given_up) and not report.environment
    if "-" not in showing.files.values() and not ended_early:
        showing.screen(report, console_for(), verbose=showing.verbose, quiet=showing.quiet)
    for name, path in showing.files.items():
        try:
            write_outputs({name: path}, report)
        except CannotRunError as error:
            problems.append(str(error))
    return problems
