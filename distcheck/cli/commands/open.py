"""`distcheck open`: shows the page of a kept run."""

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS


@click.command("open", cls=OnceCommand)
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(), **RUNS)
def command(run: str | None) -> int:
    """Open the HTML report of a saved run, the last by default, in a browser.

    distcheck renders it from the run's JSON, and saves it next to it as report.html. If no browser
    can be started, the command prints its address.
    """  # fmt: skip
    from distcheck.cli.kept_runs import open_command

    return open_command(run)
