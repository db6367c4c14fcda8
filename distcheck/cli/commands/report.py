"""`distcheck report`: a report, written again in another format."""

from typing import Any

import click

from distcheck.cli import completion
from distcheck.cli.group import Command
from distcheck.reports.files import output_options, taken_from
from distcheck.worlds.launchers import is_elsewhere


@click.command("report", cls=Command)
@click.argument("run", metavar="RUN.json", type=click.Path(), **completion.RUNS)
@output_options
def command(run: str, **asked: Any) -> int:
    """Write a report again in another format, or print its gist, from its JSON alone.

    \b
    distcheck report report.json
    distcheck report report.json --html report.html
    distcheck report .distcheck/runs/20260131-120000-4711 --html report.html
    """  # fmt: skip
    if is_elsewhere():
        return 0
    from distcheck.cli.rendering import report_command

    return report_command(run, files=taken_from(asked))
