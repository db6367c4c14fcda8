"""`distcheck report`: converts a report to another format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS
from distcheck.errors import ExitCode, UsageError
from distcheck.errors.shown_text import print_displayable
from distcheck.reports.documents import read_report
from distcheck.reports.files import (
    check_outputs,
    damaged_file_as_usage_error,
    output_options,
    pop_output_files,
    write_document,
)
from distcheck.reports.findings import describe_origin, summary_lines
from distcheck.reports.json_report import decode_document, json_schema, render
from distcheck.reports.terminal import console_for
from distcheck.store.run_folder import KEPT_RUNS


@click.command("report", cls=OnceCommand)
@click.argument("run", metavar="RUN.json", type=click.Path(), required=False, **RUNS)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of reports, and nothing else.")
@output_options
def command(run: str | None, *, schema: bool, **asked: Any) -> int:
    """Convert the JSON of a report to another format, or print a summary.

    \b
    distcheck report report.json
    distcheck report report.json --html report.html
    distcheck report .distcheck/runs/20260131-120000-4711 --html report.html
    distcheck report --schema > report.schema.json
    """  # fmt: skip
    files = pop_output_files(asked)
    if schema and not run and not files:
        click.echo(render(json_schema()), nl=False)
        return int(ExitCode.PASS)
    if schema or run is None:
        raise UsageError(
            "--schema applies to all reports; pass it without other arguments"
            if schema
            else "no report was given; pass the file that --json wrote, or the folder of a run"
        )
    convert(run, files=files)
    return int(ExitCode.PASS)


def convert(run: str, *, files: Mapping[str, str]) -> None:
    """Write a report in other formats, or print a summary if `files` is empty. `run` is a JSON
    file, or the folder of a run.

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
    with damaged_file_as_usage_error(path):
        if not files:
            found = decode_document(document)
            for line in (
                describe_origin(found.made),
                *summary_lines(found, width=console_for().width),
            ):
                print_displayable(line)
        write_document(files, document)
