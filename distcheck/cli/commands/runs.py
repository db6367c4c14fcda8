"""`distcheck runs`: lists saved runs."""

import time
from datetime import datetime
from pathlib import Path

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import json_option
from distcheck.errors import DistcheckError, ExitCode
from distcheck.errors.shown_text import one_line, print_displayable
from distcheck.reports.files import write_answer
from distcheck.reports.json_report import read_document
from distcheck.store.run_folder import DEFAULT_FOLDER, stored_runs


@click.command("runs", cls=OnceCommand)
@json_option("list")
def command(json_file: str | None) -> int:
    """List the runs saved in .distcheck here: date, verdict, folder and command.

    \b
    distcheck runs
    distcheck open .distcheck/runs/20260131-120000-4711
    """  # fmt: skip
    names = ("folder", "date", "verdict", "command")
    runs = [(str(folder), *_describe_run(folder)) for folder in stored_runs()]
    entries = [dict(zip(names, one, strict=True)) for one in runs]
    if write_answer(json_file, "distcheck.runs/1", runs=entries):
        return int(ExitCode.PASS)
    if not runs:
        print_displayable(f"{DEFAULT_FOLDER} here has no runs")
    for folder, date, verdict, command in runs:
        print_displayable(f"{date}  {verdict:<12}  {one_line(folder)}")
        if command:
            print_displayable(f"    {one_line(command)}")
    return int(ExitCode.PASS)


def _describe_run(folder: Path) -> tuple[str, str, str]:
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
