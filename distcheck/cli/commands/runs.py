"""`distcheck runs`: what is kept."""

import click

from distcheck.cli.group import Command
from distcheck.worlds.launchers import is_elsewhere


@click.command("runs", cls=Command)
def command() -> int:
    """List the runs that are kept in .distcheck here: date, verdict, folder and command.

    \b
    distcheck runs
    distcheck open .distcheck/runs/20260131-120000-4711
    """  # fmt: skip
    if is_elsewhere():
        return 0
    from distcheck.cli.kept_runs import runs_command

    return runs_command()
