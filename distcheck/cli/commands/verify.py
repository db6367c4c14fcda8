"""`distcheck verify`: options to a request, and on to the run."""

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
from distcheck.reports.files import errors_annotated, output_options, taken_from


@click.command("verify", cls=Command)
@setting_options()
@DOWNLOAD
@matrix_options
@output_options
@click.option(
    "--save",
    metavar="DIR",
    type=click.Path(),
    help="Keep cases, traces and report in a new folder, for distcheck recheck.",
)
@click.option("--digests", is_flag=True, hidden=True)  # given by distcheck record
@click.option("-v", "--verbose", is_flag=True, help="Show every check, note and table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
@click.option(
    "--last-failed",
    is_flag=True,
    help="Run only the cases that failed when they were last run here.",
)
@click.option(
    "--failed-first",
    is_flag=True,
    help="Run the cases first that failed when they were last run here.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Run again whenever the code of the strategies or workloads changes, until Ctrl-C.",
)
@click.option(
    "--on",
    metavar="ENGINE",
    help="Run the parts of the matrix as tasks of an engine: ray, ray://HOST:PORT or slurm.",
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
    """Judge strategies against single-node training at the same total batch.

    \b
    distcheck verify --strategy allreduce --world 4
    distcheck verify --strategy my_sync.py:sync --world 2 --world 3
    distcheck verify --shard 2/4 --json part-2.json
    torchrun --nproc-per-node 4 -m distcheck verify --strategy allreduce

    Reports keep exceptions and output of the code, in which secrets of the environment are
    masked: values of variables whose names say TOKEN, SECRET, PASSWORD, CREDENTIAL, AUTH, COOKIE,
    KEY or the like, and passwords in addresses. Of other variables they keep only those that bits
    depend on.
    """  # fmt: skip
    from distcheck.cli.verify_options import check_alone, plan_from_options
    from distcheck.errors import UsageError

    if digests and save is None:
        raise UsageError("--digests is an option of distcheck record; use distcheck record DIR ...")
    files = taken_from(asked)
    launch, plan = plan_from_options(asked, given_options())
    check_alone(given_options(), launched=launch is not None)
    if launch is not None and not launch.is_front:
        from distcheck.cli.under_launchers import lend

        return lend(launch, lambda: plan().cases, deadline_s=asked["deadline_s"])
    from distcheck.cli.forecast import say_plan
    from distcheck.cli.kept_runs import by_last_run
    from distcheck.cli.show_and_keep import OutputOptions, verify_command
    from distcheck.verification.run import RunOptions

    showing = OutputOptions(files=files, verbose=verbose, quiet=quiet)
    if watch:
        from distcheck.cli.watching import watch_command

        return watch_command(plan, showing, download=asked["download"])
    if on is not None:
        from distcheck.engines.running import run_on

        with errors_annotated(files):
            return run_on(on, plan, files=files, quiet=quiet)
    with errors_annotated(files):
        planned = plan()
        cases, left_out = planned.cases, dict[str, str]()
        if last_failed or failed_first:
            cases, left_out = by_last_run(cases, only=last_failed)
        if not quiet:
            say_plan(planned, costs=bool(asked["thorough"] or planned.extras.searches))
        return verify_command(
            cases,
            RunOptions(
                whole=planned.whole,
                extras=planned.extras,
                download=asked["download"],
                left_out=left_out,
            ),
            showing,
            save=save,
            digests=digests,
            launch=launch,
        )
