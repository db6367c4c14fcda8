"""`distcheck report`: writes a report in another format."""

from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS
from distcheck.errors import UsageError
from distcheck.reports.files import output_options, taken_from


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
    from distcheck.cli.kept_runs import report_command, schema_command

    files = taken_from(asked)
    if schema and not run and not files:
        return schema_command()
    if schema or run is None:
        raise UsageError(
            "--schema applies to all reports; pass it without other arguments"
            if schema
            else "no report was given; pass the file that --json wrote, or the folder of a run"
        )
    return report_command(run, files=files)
