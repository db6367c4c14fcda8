"""`distcheck compare`: compares two saved runs, or a saved run with a new run of its cases."""

from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import trust_option
from distcheck.reports.files import errors_annotated, output_options, pop_output_files


@click.command("compare", cls=OnceCommand)
@click.argument("then", metavar="DIR", type=click.Path())
@click.argument("now", metavar="[DIR]", required=False, type=click.Path())
@click.option("--bits", is_flag=True, help="Fail on every changed bit, even within its bound.")
@click.option(
    "--scores", is_flag=True, help="Compare two files of log-probabilities (distcheck.scores)."
)
@output_options
@trust_option
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict lines.")
def command(
    then: str, now: str | None, bits: bool, scores: bool, trust: bool, quiet: bool, **asked: Any
) -> int:
    """Compare a recorded run with a later one, or with a new run of its cases.

    With one folder, its cases are rerun. Code from another user's folder, and files that git does
    not track here or that have changed, run only after confirmation, or with --trust.

    \b
    distcheck record golden --strategy allreduce --world 4
    distcheck compare golden              # after an upgrade: reruns the cases
    distcheck compare golden other-run
    distcheck compare before after        # two folders of distcheck job --save
    distcheck compare trainer.safetensors rollout.safetensors --scores
    distcheck compare golden --junit compare.xml --github
    """  # fmt: skip
    from distcheck.compare.command import compare_command

    files = pop_output_files(asked)
    with errors_annotated(files):
        return compare_command(
            then, now, bits=bits, files=files, trusted=trust, quiet=quiet, scores=scores
        )
