"""`distcheck runs`: lists kept runs."""

import click

from distcheck.cli.group import OnceCommand


@click.command("runs", cls=OnceCommand)
def command() -> int:
    """List the runs saved in .distcheck here: date, verdict, folder and command.

    \b
    distcheck runs
    distcheck open .distcheck/runs/20260131-120000-4711
    """  # fmt: skip
    from distcheck.cli.kept_runs import runs_command

    return runs_command()
