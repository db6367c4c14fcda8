"""`distcheck report`: a report, written again in another format."""

from typing import Any

import click

from distcheck import completion
from distcheck.command_line import Command
from distcheck.launchers import is_elsewhere
from distcheck.outputs import output_options, taken_from


@click.command("report", cls=Command)
@click.argument("run", metavar="RUN.json", type=click.Path(), **completion.RUNS)
@output_options
def command(run: str, **asked: Any) -> int:
    """Write a report again in another format, from its JSON alone.

    \b
    distcheck report report.json --html report.html
    distcheck report .distcheck/runs/20260131-120000-4711 --html report.html
    """  # fmt: skip
    if is_elsewhere():
        return 0
    from distcheck.rendering import report_command

    return report_command(run, files=taken_from(asked))
