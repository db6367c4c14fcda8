"""What the commands `verify`, `replay` and `recheck` do around a verification: show and keep."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console

from distcheck.errors import CannotRunError
from distcheck.records import Case, Report
from distcheck.reports.json_report import render_json
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for, render
from distcheck.store import Store
from distcheck.verification import Interrupted, recheck, run_cases
from distcheck.worlds.pool import Pool


def verify_command(
    cases: Sequence[Case],
    *,
    save: str | None,
    json_file: str | None,
    verbose: bool,
    quiet: bool,
    download: bool = False,
) -> int:
    """Runs cases and shows the report; returns the exit code."""
    check_writable(json_file)
    keep = Store.by_default() if save is None else Store.at(Path(save))

    def run(pool: Pool, listener: LiveProgress) -> Report:
        return run_cases(cases, pool=pool, keep=keep, listener=listener, download=download)

    try:
        return _show(run, json_file=json_file, verbose=verbose, quiet=quiet)
    except BaseException:
        if keep is not None:
            keep.discard_if_unused()
        raise


def recheck_command(folder: str, *, json_file: str | None, verbose: bool, quiet: bool) -> int:
    """Judges a saved run again and shows the report; returns the exit code."""
    check_writable(json_file)

    def run(pool: Pool, listener: LiveProgress) -> Report:
        return recheck(Path(folder), pool=pool, listener=listener)

    return _show(run, json_file=json_file, verbose=verbose, quiet=quiet)


def _show(
    run: Callable[[Pool, LiveProgress], Report],
    *,
    json_file: str | None,
    verbose: bool,
    quiet: bool,
) -> int:
    pool = Pool()
    interrupted = False
    try:
        with LiveProgress(Console(stderr=True, quiet=quiet)) as listener:
            report = run(pool, listener)
    except Interrupted as interruption:
        report, interrupted = interruption.report, True
    finally:
        pool.close()
    if json_file != "-":
        render(report, console_for(), verbose=verbose, quiet=quiet)
    if json_file is not None:
        write_text(json_file, render_json(report))
    if interrupted:
        judged = sum(case.verdict != "unknown" for case in report.cases)
        click.echo(
            f"distcheck: interrupted after {judged} of {len(report.cases)} cases; "
            "nothing is left running",
            err=True,
        )
    elif report.save_error:
        click.echo(f"distcheck: {report.save_error}", err=True)
    return int(report.exit_code)


def check_writable(path: str | None) -> None:
    """Raises before anything runs: a verdict that cannot be written is a verdict lost."""
    if path is None or path == "-":
        return
    there = Path(path).exists()
    try:
        with Path(path).open("a"):
            pass
        if not there:
            Path(path).unlink()
    except OSError as error:
        raise CannotRunError(f"--json {path} cannot be written: {error.strerror}") from error


def write_text(path: str, text: str) -> None:
    """Writes a file, or standard output for "-". Raises CannotRunError."""
    if path == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise CannotRunError(f"--json {path} cannot be written: {error.strerror}") from error
