"""`distcheck scale`: does a strategy still hold in large worlds, and in which order of addition?"""

from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import CALL_OPTIONS, json_option, setting_option, setting_options
from distcheck.plan.settings import with_adaptation


@click.command("scale", cls=Command)
@setting_option("strategies", single=True, help="The strategy to judge.")
@click.option(
    "--world",
    "worlds",
    metavar="N,N,...",
    multiple=True,
    help="Numbers of ranks. [default: 2,8,64,256]",
)
@click.option(
    "--orders",
    metavar="NAME,NAME,...",
    multiple=True,
    help="How collectives add: gloo, ring, tree, recursive-halving, rank. [default: all]",
)
@setting_option(
    "workloads",
    single=True,
    help="The workload to train. [default: mlp:small, of 17 thousand parameters]",
)
@setting_option(
    "dtype",
    default="float32",
    show_default=True,
    help="float32, float64, bfloat16 or float16.",
)
@setting_option("steps", help="Steps to record. [default: 2]")
@setting_option(
    "batch",
    default=None,
    type=int,
    help="Samples per step over all ranks, the same in every world. "
    "[default: 256, or one a rank of the largest world]",
)
@setting_options("seed")
@setting_option("deadline_s", default=120.0)
@json_option("report, with the errors under `scale`,")
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the report as one HTML page, with a picture of error against world.",
)
@click.option("-v", "--verbose", is_flag=True, help="Also print the whole report of each world.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what each order comes to.")
@setting_options(*CALL_OPTIONS)
def command(**asked: Any) -> int:
    """Judge a strategy in simulated worlds of several sizes and orders of addition, and print the
    largest error beside its bound.

    \b
    distcheck scale --strategy my_sync.py:sync --world 2,8,64,256,1024
    distcheck scale --strategy my_sync.py:sync --orders tree --html scale.html

    All worlds train on the same total batch, as the single-process reference does.
    """  # fmt: skip
    from distcheck.cli.show_and_keep import OutputOptions, verify_command
    from distcheck.plan.scale import plan_scale
    from distcheck.plan.thorough import ThoroughExtras
    from distcheck.reports import scale_screen
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
        OutputOptions(files=files, verbose=verbose, quiet=quiet, screen=scale_screen.render),
        save=None,
    )
