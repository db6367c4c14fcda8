"""`distcheck compare`: two saved runs, or one and what the same cases give now."""

import click

from distcheck.command_line import Command
from distcheck.launchers import is_elsewhere
from distcheck.options import json_option


@click.command("compare", cls=Command)
@click.argument("then", metavar="DIR", type=click.Path())
@click.argument("now", metavar="[DIR]", required=False, type=click.Path())
@click.option("--bits", is_flag=True, help="Any changed bit fails, within its bound or not.")
@json_option("comparison")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
def command(then: str, now: str | None, bits: bool, json_file: str | None, quiet: bool) -> int:
    """Compare a recorded run with a later one, or with what its cases give here and now.

    \b
    distcheck record golden --strategy allreduce --world 4
    distcheck compare golden              # after an upgrade: runs the cases again
    distcheck compare golden other-run
    """  # fmt: skip
    if is_elsewhere():
        return 0
    from distcheck.goldens.command import compare_command

    return compare_command(then, now, bits=bits, json_file=json_file, quiet=quiet)
