"""What `distcheck report` does: a document from a file, and out again in other formats."""

from collections.abc import Mapping
from pathlib import Path

import click

from distcheck.errors import ExitCode, UsageError
from distcheck.errors.shown_text import say
from distcheck.reports.document import json_schema
from distcheck.reports.document_screen import screen_of
from distcheck.reports.documents import read_report
from distcheck.reports.files import check_outputs, damage_said, write_document
from distcheck.reports.findings import describe_origin
from distcheck.reports.json_report import render
from distcheck.reports.terminal import console_for
from distcheck.store.run_folder import KEPT_RUNS


def schema_command() -> int:
    """Prints the JSON Schema of a report, which is made from what writes and reads it."""
    click.echo(render(json_schema()), nl=False)
    return int(ExitCode.PASS)


def report_command(run: str, *, files: Mapping[str, str]) -> int:
    """Renders a report again, or prints its gist where no file is asked for; returns the exit code,
    which says nothing of the verdict. `run` is a JSON, or a run's folder.

    Raises UsageError for what is not a report, CannotRunError where nothing can be written.
    """
    path = Path(run)
    if path.is_dir():
        path /= "report.json"
    if not path.exists():
        of = f"{run} holds no report" if Path(run).is_dir() else f"{run} does not exist"
        raise UsageError(f"{of}; {KEPT_RUNS}")
    document = read_report(path)
    if any(Path(file).absolute() == path.absolute() for file in files.values()):
        raise UsageError(f"{path} is the report that is read; write to another file")
    check_outputs(files)
    with damage_said(path):
        if not files:
            for line in (
                describe_origin(document),
                *screen_of(document, width=console_for().width),
            ):
                say(line)
        write_document(files, document)
    return int(ExitCode.PASS)
