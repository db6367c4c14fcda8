"""`distcheck plan`: what `verify` would do with the same options."""

from typing import Any

import click

from distcheck.cli.commands import verify
from distcheck.cli.group import OnceCommand
from distcheck.cli.options import given_options, json_option
from distcheck.reports.files import output_names

# Of verify's options, those that are about a run that has happened.
_NOT_OF_A_PLAN = (*output_names(), "save", "verbose", "quiet", "download")


@json_option("plan")
def command(json_file: str | None, **asked: Any) -> int:
    """Print what verify would run with the same options, and about how long it would take.

    \b
    distcheck plan
    distcheck plan --shard 2/4 --json -
    """  # fmt: skip
    from distcheck.cli.forecast import plan_command
    from distcheck.cli.verify_options import plan_from_options

    _, plan = plan_from_options(asked, given_options())
    return plan_command(plan(), json_file=json_file)


command = click.command("plan", cls=OnceCommand)(command)
command.params = [
    *(option for option in verify.command.params if option.name not in _NOT_OF_A_PLAN),
    *command.params,
]
