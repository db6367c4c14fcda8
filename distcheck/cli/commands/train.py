"""`distcheck train`: trains without running any checks."""

from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import (
    CALL_OPTIONS,
    DOWNLOAD,
    given_options,
    json_option,
    setting_option,
    setting_options,
)
from distcheck.plan.settings import with_adaptation


@click.command("train", cls=Command)
@setting_option(
    "strategies",
    single=True,
    help="Strategy that synchronizes. Without it, a single process trains.",
)
@setting_option("worlds", single=True, help="Number of ranks. [default: 1, or 4 with a strategy]")
@setting_option(
    "workloads", single=True, default="vgg11", show_default=True, help="Workload to train."
)
@click.option("--epochs", default=1, show_default=True, metavar="N", help="Number of epochs.")
@setting_option("steps", help="Stop every epoch after N steps.")
@setting_option(
    "dtype",
    default="float32",
    show_default=True,
    help="Dtype: float32, float64, bfloat16 or float16.",
)
@click.option(
    "--log-every",
    default=20,
    show_default=True,
    metavar="N",
    help="Print the running loss every N steps; 0: never.",
)
@json_option("figures")
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the curves of loss, accuracy and seconds per step as one HTML page.",
)
@click.option(
    "--overlay",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Overlay the curves of an earlier --json FILE on the page; may be repeated.",
)
@setting_options("data", "data_dir", "batch", "seed", "backend", "device", "deadline_s")
@DOWNLOAD
@setting_options(*CALL_OPTIONS)
def command(**asked: Any) -> int:
    """Train with a strategy, and print loss, accuracy and seconds per step.

    \b
    distcheck train --data cifar10 --data-dir ~/data
    distcheck train --data cifar10 --data-dir ~/data --strategy ddp --world 4
    """  # fmt: skip
    from distcheck.cli.training_run import plan_training, train_command
    from distcheck.plan.matrix import check_data_dir
    from distcheck.worlds.launchers import launch_of

    check_data_dir(given_options(), {asked["data"]})
    asked = with_adaptation(asked)
    launch, _ = launch_of({}, (asked["world"],) if asked["world"] else ())
    if launch is not None:
        asked["world"] = launch.world
    if launch is not None and not launch.is_front:
        from distcheck.cli.under_launchers import lend_ranks

        not_its = ("json_file", "html_file", "overlay", "download")
        own = {name: asked[name] for name in asked if name not in not_its}
        return lend_ranks(launch, lambda: [plan_training(**own)], deadline_s=asked["deadline_s"])
    return train_command(**asked, launch=launch)
