"""Runs `distcheck explore`: searches for the smallest case in which a strategy fails."""

from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import (
    CALL_OPTIONS,
    given_options,
    json_option,
    setting_option,
    setting_options,
)
from distcheck.plan.settings import with_adaptation


@click.command("explore", cls=Command)
@setting_option(
    "strategies",
    single=True,
    help="The strategy to search for failures. [default: the strategies of pyproject.toml's "
    "matrix]",
)
@click.option(
    "--budget",
    default="5m",
    show_default=True,
    metavar="TIME",
    help="Time to search: 90s, 5m, 1h. Shrinking a failure may take another minute.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="File with the matrix. [default: pyproject.toml here or above, tool.distcheck]",
)
@click.option("--max-cases", type=int, metavar="N", help="Maximum number of cases to draw.")
@setting_option("seed", help="Seed for the search.")
@setting_option(
    "worlds", single=True, default=6, show_default=True, help="Maximum number of ranks."
)
@setting_option("steps", default=6, show_default=True, help="Maximum number of steps.")
@setting_option(
    "backend",
    help="Backend: gloo, simulated or simulated:ORDER. A simulated world runs in one process, and "
    "its cases also vary the order in which ranks run.",
)
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=VALUE",
    help=(
        "Value to try for a parameter of the strategy. Repeat it for more values, simplest first."
    ),
)
@click.option(
    "--without",
    multiple=True,
    metavar="WORD",
    help="Exclude features that the strategy does not support: strided, frozen, unequal, "
    "accumulate, "
    "absent, nested, norm, groups, schedule, late, turns, ...",
)
@setting_option("deadline_s", default=3.0)
@json_option("findings")
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict and the replay line.")
@setting_options(*CALL_OPTIONS)
def command(**asked: Any) -> int:
    """Search worlds, batches, accumulation, models, dtypes, layouts and delayed ranks for a
    failure, and shrink it.

    \b
    distcheck explore --strategy my_sync.py:sync --budget 5m
    distcheck explore --strategy my_sync.py:sync --max-cases 200 --world 3
    distcheck explore --strategy my_sync.py:sync --backend simulated
    """  # fmt: skip
    from distcheck.addons.explore.command import explorations, explore_command

    searches = explorations(asked, given_options())
    return explore_command([with_adaptation(search) for search in searches])
