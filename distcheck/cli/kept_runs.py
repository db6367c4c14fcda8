"""The commands `distcheck report`, `runs` and `open` for kept runs and reports."""

import time
import webbrowser
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import click

from distcheck.errors import DistcheckError, ExitCode, UsageError
from distcheck.errors.shown_text import one_line, say
from distcheck.records import Case
from distcheck.reports.document import decoded, json_schema
from distcheck.reports.documents import read_report
from distcheck.reports.files import check_outputs, damage_said, write_document
from distcheck.reports.findings import describe_origin, screen_of
from distcheck.reports.json_report import read_document, render
from distcheck.reports.terminal import console_for
from distcheck.store import earlier_runs
from distcheck.store.run_folder import DEFAULT_FOLDER, KEPT_RUNS, kept_runs


def runs_command() -> int:
    runs = kept_runs()
    if not runs:
        say(f"{DEFAULT_FOLDER} here has no runs")
    for folder in runs:
        date, verdict, command = _about(folder)
        say(f"{date}  {verdict:<12}  {one_line(str(folder))}")
        if command:
            say(f"    {one_line(command)}")
    return int(ExitCode.PASS)


def open_command(run: str | None) -> int:
    """Show the page of a run; return the exit code. Raises UsageError if there is none."""
    folder = Path(run) if run is not None else _last_finished()
    page = (folder if folder.is_dir() else folder.parent) / "report.html"
    if page.is_symlink() or (page.exists() and not page.is_file()):
        raise UsageError(f"{page} is a link or a special file; expected a regular file; remove it")
    report_command(str(folder), files={"html": str(page)})
    address = page.absolute().as_uri()
    try:
        shown = webbrowser.open(address)
    except webbrowser.Error:
        shown = False
    say(address if shown else f"no browser could be started; open {address}")
    return int(ExitCode.PASS)


def by_last_run(cases: Sequence[Case], *, only: bool) -> tuple[list[Case], dict[str, str]]:
    """Return the cases, those that failed in their last run here first; with `only`, just these,
    and the reason for each case left out. If none failed, return all.
    """
    failed = earlier_runs.of_cases(DEFAULT_FOLDER / "runs", cases)
    if not failed:
        which = (
            f"none of these {len(cases)} cases failed" if cases[1:] else "this case did not fail"
        )
        so = "all are run" if cases[1:] else "it is run"
        say(f"distcheck: {which} when last run here ({DEFAULT_FOLDER / 'runs'}); {so}", err=True)
        return list(cases), {}
    first = earlier_runs.first(cases, failed)
    which = "are run" if only else "go first"
    say(
        f"distcheck: {len(failed)} of {len(cases)} cases failed when last run here; they {which}",
        err=True,
    )
    out = earlier_runs.the_others(cases, failed) if only else {}
    return [case for case in first if case.id not in out], out


def _last_finished() -> Path:
    finished = [folder for folder in kept_runs() if (folder / "report.json").is_file()]
    if not finished:
        raise UsageError(f"{DEFAULT_FOLDER} has no run with a report; pass the folder of a run")
    return finished[-1]


def _about(folder: Path) -> tuple[str, str, str]:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
    file = folder / "report.json"
    if not file.is_file():
        return began, "not finished", ""
    try:
        document = read_document(file)
        made = document.get("made") or {}
        date = made.get("date") or ""
        if date:
            began = datetime.fromisoformat(date).astimezone().strftime("%Y-%m-%d %H:%M")
        return began, str(document["verdict"]), str(made.get("command") or "")
    except (DistcheckError, KeyError, TypeError, ValueError, AttributeError):
        return began, "not readable", ""


def schema_command() -> int:
    """Print the JSON Schema of a report, derived from the structs that encode and decode it."""
    click.echo(render(json_schema()), nl=False)
    return int(ExitCode.PASS)


def report_command(run: str, *, files: Mapping[str, str]) -> int:
    """Write a report in other formats, or print a summary if there are no `files`; return the exit
    code, which is independent of the verdict. `run` is a JSON file, or a run's folder.

    Raises UsageError for an invalid report, CannotRunError if writing fails.
    """
    path = Path(run)
    if path.is_dir():
        path /= "report.json"
    if not path.exists():
        of = f"{run} holds no report" if Path(run).is_dir() else f"{run} does not exist"
        raise UsageError(f"{of}; {KEPT_RUNS}")
    document = read_report(path)
    if any(Path(file).absolute() == path.absolute() for file in files.values()):
        raise UsageError(f"{path} is the input report; write to a different file")
    check_outputs(files)
    with damage_said(path):
        if not files:
            found = decoded(document)
            for line in (
                describe_origin(found.made),
                *screen_of(found, width=console_for().width),
            ):
                say(line)
        write_document(files, document)
    return int(ExitCode.PASS)
