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
    help="Backend to probe: its name, or a function that registers one. [default: all known "
    "backends]",
)
@setting_option(
    "device",
    default="",
    help="Device of the tensors: cpu or cuda. [default: the backend's own]",
    show_default=False,
)
@click.option("--world", default=3, show_default=True, metavar="N", help="Number of ranks.")
@click.option(
    "--op", "operations", multiple=True, metavar="NAME", help="Probe only these operations."
)
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="Probe only these dtypes.")
@click.option(
    "--form",
    "forms",
    multiple=True,
    metavar="NAME",
    help="Probe only these forms: plain, strided, ...",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=SECONDS,
    default=3.0,
    metavar="TIME",
    help="Time without progress after which a call counts as hung. [default: 3s]",
)
@click.option(
    "--baseline",
    "baseline_file",
    metavar="FILE",
    type=click.Path(),
    help="Report of an earlier --json: its findings do not fail this run.",
)
@json_option("cells")
@click.option("-v", "--verbose", is_flag=True, help="Print every form and every finding.")
def command(**asked: Any) -> int:
    """Probe communication backends: which operations are correct, wrong, refused, or hang.

    \b
    distcheck backends --backend gloo
    distcheck backends --backend my_pkg.my_backend:register --op all_reduce -v
    """  # fmt: skip
    from distcheck.addons.backend_probe.command import backends_command

    return backends_command(**asked)
