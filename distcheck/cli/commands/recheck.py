"""`distcheck recheck`: a saved run, judged again."""

from typing import Any

import click

from distcheck.cli import completion
from distcheck.cli.group import Command
from distcheck.reports.files import output_options, taken_from
from distcheck.worlds.launchers import is_elsewhere


@click.command("recheck", cls=Command)
@click.argument("folder", metavar="DIR", type=click.Path(), **completion.RUNS)
@output_options
@click.option("-v", "--verbose", is_flag=True, help="Show every table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
def command(folder: str, verbose: bool, quiet: bool, **asked: Any) -> int:
    """Judge a saved run again; starts no rank."""  # fmt: skip
    if is_elsewhere():
        return 0
    from distcheck.cli.show_and_keep import recheck_command

    return recheck_command(folder, files=taken_from(asked), verbose=verbose, quiet=quiet)
