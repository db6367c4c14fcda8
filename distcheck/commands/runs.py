"""`distcheck runs`: what is kept."""

import click

from distcheck.command_line import Command
from distcheck.launchers import is_elsewhere


@click.command("runs", cls=Command)
def command() -> int:
    """List the runs that are kept in .distcheck here: date, verdict, folder and command.

    \b
    distcheck runs
    distcheck open .distcheck/runs/20260131-120000-4711
    """  # fmt: skip
    if is_elsewhere():
        return 0
    from distcheck.kept import runs_command

    return runs_command()
