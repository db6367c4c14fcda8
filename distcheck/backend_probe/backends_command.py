"""`distcheck backends`: probes the operations of a backend."""

from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import SECONDS, json_option, setting_option


@click.command("backends", cls=OnceCommand)
@setting_option(
    "backend",
    multiple=True,
    default=(),
    metavar="NAME|FILE.py:OBJ|MOD:OBJ",
    help="What to probe: the name of a backend, or a function that registers one. [default: all "
    "known backends]",
)
@setting_option(
    "device", default="", help="cpu or cuda. [default: the backend's own]", show_default=False
)
@click.option("--world", default=3, show_default=True, metavar="N", help="Number of ranks.")
@click.option("--op", "operations", multiple=True, metavar="NAME", help="Only these operations.")
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="Only these dtypes.")
@click.option(
    "--form", "forms", multiple=True, metavar="NAME", help="Only these forms: plain, strided, ..."
)
@click.option(
    "--deadline",
    "deadline_s",
    type=SECONDS,
    default=3.0,
    metavar="TIME",
    help="Time without progress after which a call has hung. [default: 3s]",
)
@click.option(
    "--baseline",
    "baseline_file",
    metavar="FILE",
    type=click.Path(),
    help="An earlier --json: findings that are in it do not fail this run.",
)
@json_option("cells")
@click.option("-v", "--verbose", is_flag=True, help="Show every form and every finding.")
def command(**asked: Any) -> int:
    """Probe communication backends: which operations are right, wrong, refused, or never end.

    \b
    distcheck backends --backend gloo
    distcheck backends --backend my_pkg.my_backend:register --op all_reduce -v
    """  # fmt: skip
    from distcheck.backend_probe.command import backends_command

    return backends_command(**asked)
