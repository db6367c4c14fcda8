"""`distcheck open`: shows the page of a kept run."""

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS


@click.command("open", cls=OnceCommand)
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(), **RUNS)
def command(run: str | None) -> int:
    """Show the HTML report of a kept run, the last by default, in a browser.

    It is made from the run's JSON, and is kept next to it as report.html. If no browser can be
    started, its address is printed.
    """  # fmt: skip
    from distcheck.cli.kept_runs import open_command

    return open_command(run)
