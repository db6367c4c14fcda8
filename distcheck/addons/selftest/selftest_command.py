"""`distcheck selftest`: tests the tool itself on this machine."""

from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import json_option, setting_option, setting_options


@click.command("selftest", cls=OnceCommand)
@click.option(
    "--quick", is_flag=True, help=("Run one mutant per check and layer, and two strategies.")
)
@click.option(
    "-k",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Run only mutants whose displayed name contains this text, with wildcards * and ?.",
)
@setting_option(
    "backend", help="Backend: gloo; or simulated, whose ranks are threads of one process."
)
@setting_options("device")
@json_option("table")
@click.option("-v", "--verbose", is_flag=True, help="Print every correct case.")
def command(**asked: Any) -> int:
    """Run the mutant zoo: check that every planted bug is caught and named, and that correct code
    passes.

    \b
    distcheck selftest
    distcheck selftest --quick
    distcheck selftest --backend simulated
    distcheck selftest -k scale -k ddp
    """  # fmt: skip
    from distcheck.addons.selftest.command import selftest_command

    return selftest_command(**asked)
