"""`distcheck recheck`: judges a saved run again."""

from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS, trust_option
from distcheck.reports.files import output_options, taken_from


@click.command("recheck", cls=OnceCommand)
@click.argument("folder", metavar="DIR", type=click.Path(), **RUNS)
@output_options
@click.option("-v", "--verbose", is_flag=True, help="Print every check, note and table in full.")
@trust_option
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict lines.")
def command(folder: str, verbose: bool, quiet: bool, trust: bool, **asked: Any) -> int:
    """Judge a saved run again, without starting ranks.

    Judging executes the workload and loads the strategy. Code from another user's folder, and
    files that git does not track here or that have changed, run only after confirmation, or with
    --trust.
    """  # fmt: skip
    from distcheck.cli.show_and_keep import OutputOptions, recheck_command

    showing = OutputOptions(files=taken_from(asked), verbose=verbose, quiet=quiet)
    return recheck_command(folder, showing, trusted=trust)
