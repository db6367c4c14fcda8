"""`distcheck scale`: judges a strategy in large simulated worlds, once for each reduction order."""

from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import CALL_OPTIONS, json_option, setting_option, setting_options
from distcheck.plan.settings import with_adaptation


@click.command("scale", cls=Command)
@setting_option("strategies", single=True, help="Strategy to judge.")
@click.option(
    "--world",
    "worlds",
    metavar="N,N,...",
    multiple=True,
    help="World sizes. [default: 2,8,64,256]",
)
@click.option(
    "--orders",
    metavar="NAME,NAME,...",
    multiple=True,
    help="Reduction orders of collectives: gloo, ring, tree, recursive-halving, rank. [default: "
    "all]",
)
@setting_option(
    "workloads",
    single=True,
    help="Workload to train. [default: mlp:small, with 17 thousand parameters]",
)
@setting_option(
    "dtype",
    default="float32",
    show_default=True,
    help="Dtype: float32, float64, bfloat16 or float16.",
)
@setting_option("steps", help="Number of steps to record. [default: 2]")
@setting_option(
    "batch",
    default=None,
    type=int,
    help="Global batch size, the same in every world. [default: 256, or the largest world size "
    "if greater]",
)
@setting_options("seed")
@setting_option("deadline_s", default=120.0)
@json_option("report, with the errors under `scale`,")
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the report as one HTML page, with a picture of error against world size.",
)
@click.option("-v", "--verbose", is_flag=True, help="Also print the whole report of each world.")
@click.option("-q", "--quiet", is_flag=True, help="Print only one verdict line per order.")
@setting_options(*CALL_OPTIONS)
def command(**asked: Any) -> int:
    """Judge a strategy in simulated worlds of several sizes and reduction orders, and print the
    largest error and its bound.

    \b
    distcheck scale --strategy my_sync.py:sync --world 2,8,64,256,1024
    distcheck scale --strategy my_sync.py:sync --orders tree --html scale.html

    All worlds and the single-process reference use the same global batch size.
    """  # fmt: skip
    from distcheck.addons.simulated.scale import plan_scale, render
    from distcheck.cli.show_and_keep import OutputOptions, verify_command
    from distcheck.plan.thorough import ThoroughExtras
    from distcheck.verification.run import RunOptions

    files = {
        name: path for name in ("json", "html") if (path := asked.pop(f"{name}_file")) is not None
    }
    verbose, quiet = asked.pop("verbose"), asked.pop("quiet")
    worlds, orders, strategy = asked.pop("worlds"), asked.pop("orders"), asked.pop("strategy")
    asked["strategies"] = (strategy,) if strategy else ()
    cases = plan_scale(
        with_adaptation(asked),
        worlds=",".join(worlds) or None,
        orders=",".join(orders) or None,
    )
    spare = tuple({case.world for case in cases})
    return verify_command(
        cases,
        RunOptions(extras=ThoroughExtras(spare=spare, required=True)),
        OutputOptions(files=files, verbose=verbose, quiet=quiet, screen=render),
        save=None,
    )
