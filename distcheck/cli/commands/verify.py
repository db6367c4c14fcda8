"""`distcheck verify`: options to a request, and on to the run."""

from typing import Any

import click

from distcheck.cli import completion
from distcheck.cli.group import Command
from distcheck.cli.options import (
    adapter_options,
    case_options,
    given_options,
    machine_options,
    matrix_options,
    setting_options,
)
from distcheck.reports.files import errors_annotated, output_options, taken_from


@click.command("verify", cls=Command)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME|FILE.py:OBJ|MOD:OBJ",
    help=(
        "The strategy to judge; may be given several times. [default: the matrix of pyproject.toml]"
    ),
    **completion.STRATEGIES,
)
@click.option(
    "--world",
    "worlds",
    multiple=True,
    type=int,
    metavar="N",
    help="Number of ranks; may be given several times. "
    "[default: 4, or what a launcher has started]",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="The workload to train; may be given several times. [default: lattice, cnn and composite, "
    "and the cell absent_on_some, which counts only where all ranks finish it]",
    **completion.WORKLOADS,
)
@click.option(
    "--without",
    multiple=True,
    metavar="CELL",
    help="Leave out a cell; may be given several times.",
    **completion.CELLS,
)
@click.option(
    "--dtype",
    metavar="NAME",
    help="float32, float64, bfloat16 or float16. [default: float32, and float64 where quick]",
    **completion.DTYPES,
)
@setting_options
@matrix_options
@output_options
@click.option(
    "--save",
    metavar="DIR",
    type=click.Path(),
    help="Keep cases, traces and report in a new folder, for distcheck recheck.",
)
@click.option("--digests", is_flag=True, hidden=True)  # given by distcheck record
@click.option("-v", "--verbose", is_flag=True, help="Show every table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
@case_options
@adapter_options
@machine_options
def command(
    save: str | None,
    digests: bool,
    verbose: bool,
    quiet: bool,
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
    from distcheck.cli.asking import plan_asked
    from distcheck.errors import UsageError

    if digests and save is None:
        raise UsageError("--digests is an option of distcheck record; use distcheck record DIR ...")
    files = taken_from(asked)
    launch, plan = plan_asked(asked, given_options())
    if launch is not None and not launch.is_front:
        from distcheck.cli.under_launchers import lend

        return lend(launch, lambda: plan().cases, deadline_s=asked["deadline_s"])
    from distcheck.cli.forecast import say_cost
    from distcheck.cli.show_and_keep import verify_command

    with errors_annotated(files):
        planned = plan()
        if asked["thorough"] or planned.beside.searches:
            say_cost(planned, quiet=quiet)
        return verify_command(
            planned.cases,
            whole=planned.whole,
            beside=planned.beside,
            save=save,
            digests=digests,
            files=files,
            verbose=verbose,
            quiet=quiet,
            download=asked["download"],
            launch=launch,
        )
