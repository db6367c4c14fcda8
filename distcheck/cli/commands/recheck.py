"""`distcheck recheck`: judges a saved run again."""

from pathlib import Path
from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS, trust_option
from distcheck.cli.show_and_keep import OutputOptions, show_run
from distcheck.reports.files import check_outputs, output_options, pop_output_files
from distcheck.store.run_folder import saved_traces
from distcheck.store.trust import require_trust
from distcheck.verification.rechecking import recheck
from distcheck.worlds.pool import Pool


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
    showing = OutputOptions(files=pop_output_files(asked), verbose=verbose, quiet=quiet)
    check_outputs(showing.files)
    traces = saved_traces(Path(folder))
    cases = [trace.saved.case for trace in traces]
    made = {trace.saved.case.id: trace.saved.made for trace in traces}
    require_trust(folder, cases, made, doing="rechecking", trusted=trust)
    pool = Pool()
    return show_run(
        lambda listener: recheck(Path(folder), traces, pool=pool, listener=listener), pool, showing
    )
