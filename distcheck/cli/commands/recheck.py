"""`distcheck recheck`: a saved run, judged again."""

from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS, trust_option
from distcheck.reports.files import output_options, taken_from


@click.command("recheck", cls=OnceCommand)
@click.argument("folder", metavar="DIR", type=click.Path(), **RUNS)
@output_options
@click.option("-v", "--verbose", is_flag=True, help="Show every check, note and table in full.")
@trust_option
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
def command(folder: str, verbose: bool, quiet: bool, trust: bool, **asked: Any) -> int:
    """Judge a saved run again; starts no rank.

    Judging runs the workload and looks at the strategy. Code of a folder that was handed over, and
    files that git does not track here or that have changed, run after a yes on a terminal, or with
    --trust.
    """  # fmt: skip
    from distcheck.cli.show_and_keep import OutputOptions, recheck_command

    showing = OutputOptions(files=taken_from(asked), verbose=verbose, quiet=quiet)
    return recheck_command(folder, showing, trusted=trust)
