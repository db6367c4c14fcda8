"""`distcheck verify`: converts options to a request and runs it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import (
    DOWNLOAD,
    given_options,
    machine_options,
    matrix_options,
    setting_options,
)
from distcheck.reports.files import errors_annotated, output_options, pop_output_files


@click.command("verify", cls=Command)
@setting_options()
@DOWNLOAD
@matrix_options
@output_options
@click.option(
    "--save",
    metavar="DIR",
    type=click.Path(),
    help="Save cases, traces and report in a new folder, for distcheck recheck.",
)
@click.option("--digests", is_flag=True, hidden=True)  # set by distcheck record
@click.option("-v", "--verbose", is_flag=True, help="Print every check, note and table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict lines.")
@click.option(
    "--last-failed",
    is_flag=True,
    help="Run only the cases that failed in their last run here.",
)
@click.option(
    "--failed-first",
    is_flag=True,
    help="Run the cases that failed in their last run here first.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Rerun whenever the code of a strategy or workload changes, until Ctrl-C.",
)
@click.option(
    "--on",
    metavar="ENGINE",
    help="Run the parts of the matrix as tasks on a cluster: ray, ray://HOST:PORT or slurm.",
)
@machine_options
def command(
    save: str | None,
    digests: bool,
    verbose: bool,
    quiet: bool,
    last_failed: bool,
    failed_first: bool,
    watch: bool,
    on: str | None,
    **asked: Any,
) -> int:
    """Compare strategies with single-process training at the same global batch size.

    \b
    distcheck verify --strategy allreduce --world 4
    distcheck verify --strategy my_sync.py:sync --world 2 --world 3
    distcheck verify --shard 2/4 --json part-2.json
    torchrun --nproc-per-node 4 -m distcheck verify --strategy allreduce

    Reports contain exceptions and output of the code. distcheck masks passwords in addresses, and
    the values of environment variables whose names contain TOKEN, SECRET, PASSWORD, CREDENTIAL,
    AUTH, COOKIE, KEY or similar words. Of the other variables, reports contain only those that
    affect numerical results.
    """  # fmt: skip
    from distcheck.cli.verify_options import (
        check_exclusive_options,
        order_by_last_run,
        plan_from_options,
    )
    from distcheck.errors import UsageError

    if digests and save is None:
        raise UsageError("--digests is an option of distcheck record; run distcheck record DIR ...")
    files = pop_output_files(asked)
    launch, plan = plan_from_options(asked, given_options())
    check_exclusive_options(given_options(), launched=launch is not None)
    if launch is not None and not launch.is_front:
        from distcheck.cli.under_launchers import lend_ranks

        return lend_ranks(launch, lambda: plan().cases, deadline_s=asked["deadline_s"])
    from distcheck.cli.forecast import print_plan_estimate
    from distcheck.cli.show_and_keep import OutputOptions, verify_command
    from distcheck.verification.run import RunOptions

    showing = OutputOptions(files=files, verbose=verbose, quiet=quiet)
    if watch:
        from distcheck.cli.watching import watch_command

        return watch_command(plan, showing, download=asked["download"])
    if on is not None:
        from distcheck import registry

        with errors_annotated(files):
            code: int = registry.load("engines").run_on(on, plan, files=files, quiet=quiet)
            return code

    def run() -> int:
        planned = plan()
        cases, left_out = planned.cases, dict[str, str]()
        if last_failed or failed_first:
            cases, left_out = order_by_last_run(cases, only=last_failed)
        if not quiet:
            print_plan_estimate(planned, costs=bool(asked["thorough"] or planned.extras.searches))
        options = RunOptions(whole=planned.whole, extras=planned.extras, left_out=left_out)
        options = replace(options, download=asked["download"])
        return verify_command(cases, options, showing, save=save, digests=digests, launch=launch)

    with errors_annotated(files):
        may_change = launch is None and "backend" not in given_options()
        return _use_mpi_if_needed(run, asked) if may_change else run()


def _use_mpi_if_needed(run: Callable[[], int], asked: dict[str, Any]) -> int:
    """Run a strategy that works only with MPI on the MPI backend, if it is the only strategy. With
    several strategies, the others may not work on that backend.
    """
    from distcheck.errors import OtherBackendError

    try:
        return run()
    except OtherBackendError as error:
        if error.name != "mpi" or len(asked["strategies"]) != 1:
            raise
        click.echo("distcheck: taking --backend mpi, which this code needs", err=True)
        asked["backend"] = error.name
    return run()
