"""Options that several commands share. Imports nothing heavy: `--help` reads them."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from distcheck.cli import completion
from distcheck.plan.settings import DEFAULTS, SETTINGS

F = TypeVar("F", bound=Callable[..., Any])


def json_option(what: str) -> Callable[[F], F]:
    """Where to write what a command has found."""
    return click.option(
        "--json",
        "json_file",
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help=f"Write the {what} as JSON; - for standard output.",
    )


def trust_option(command: F) -> F:
    """What every command has that runs the code that a file or folder names."""
    return click.option(
        "--trust", is_flag=True, help="Run code from outside this checkout without asking."
    )(command)


def case_options(command: F) -> F:
    """What `verify` and `train` share."""
    options = [
        click.option("--data", default="synthetic", show_default=True, metavar="NAME",
                     help="synthetic, cifar10 or mnist.", **completion.DATA),
        click.option("--data-dir", metavar="DIR", type=click.Path(),
                     help="Where the data set's files are: their folder, its parent, or the "
                         "archive. [default: data]"),
        click.option("--download", is_flag=True, help="Download the files if they are missing."),
        click.option("--batch", default=256, show_default=True, metavar="N",
                     help="Samples per step, over all ranks."),
        click.option("--seed", default=0, show_default=True, metavar="N",
                     help="The seed of all random streams."),
        click.option("--backend", default="gloo", show_default=True, metavar="NAME",
                     help=(
                         "The backend that ranks communicate by: gloo, mpi or nccl; or simulated, "
                         "a world in one process: simulated:ORDER adds as gloo, ring, tree, "
                         "recursive-halving or rank."
                     ), **completion.BACKENDS),
        click.option("--device", default="cpu", show_default=True, metavar="NAME",
                     help="cpu or cuda.", **completion.DEVICES),
        click.option("--deadline-s", default=30.0, show_default=True, metavar="S",
                     help="Idle seconds without progress after which a world has hung."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def setting_options(command: F) -> F:
    """The settings of a verification, as `plan/settings.py` declares them."""
    for name, setting in reversed(list(SETTINGS.items())):
        flag, default = f"--{name.replace('_', '-')}", DEFAULTS[name]
        if default is True:
            flag += f"/--no-{name.replace('_', '-')}"
        said = setting.default or (flag.partition("/")[0] if default is True else "")
        command = click.option(
            flag,
            is_flag=isinstance(default, bool),
            default=default,
            type=get_args(setting.kind)[0] if get_args(setting.kind) else setting.kind,
            metavar=setting.metavar,
            show_default=not said and default not in (None, False),
            help=f"{setting.help} [default: {said}]" if said else setting.help,
        )(command)
    return command


def matrix_options(command: F) -> F:
    """Where the matrix is, and which part of it is meant."""
    options = [
        click.option("--config", metavar="FILE", type=click.Path(dir_okay=False),
                     help="The file with the matrix. [default: pyproject.toml here or above, "
                         "tool.distcheck]"),
        click.option("--shard", metavar="I/N",
                     help="Run only part I of N of the cases; distcheck merge joins the reports."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def given_options() -> frozenset[str]:
    """The parameters of the command that is running whose options were typed."""
    context = click.get_current_context()
    usual = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    return frozenset(n for n in context.params if context.get_parameter_source(n) not in usual)


def adapter_options(command: F) -> F:
    """How to call code that was not written for distcheck."""
    options = [
        click.option("--as", "form", metavar="FORM",
                     help="The strategy's form: model, wrapper, comm-hook, ... "
                     "[default: by its signature]",
                     **completion.FORMS),
        click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE",
                     help="Set an argument of the strategy."),
        click.option("--set", "variables", multiple=True, metavar="NAME=VALUE",
                     help="Set a name in the strategy's module."),
        click.option("--finish", metavar="METHOD",
                     help="The method of a wrapper to call after backward; none: call none."),
        click.option("--reset", metavar="METHOD", help=(
            "The method of a wrapper to call before every step."
        )),
        click.option("--without-data", multiple=True, type=int, metavar="RANK",
                     help="A rank without a shard of the batch, for example a parameter server."),
        click.option("--loss", default="mean", show_default=True, metavar="NAME",
                     help="The loss that backward gets: mean, mean/world, sum/global or tokens.",
                     **completion.LOSSES),
        click.option("--accept", metavar="KIND",
                     help="An intended deviation: low-precision:bf16 (fp16, fp32), "
                         "quantised:BITS, low-rank:RANK or local-sgd:PERIOD."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def with_adaptation(asked: dict[str, Any]) -> dict[str, Any]:
    """The options of `_adapter_options`, put together."""
    from distcheck.training.adapters.asked import adaptation_of

    names = ("form", "arguments", "variables", "finish", "reset", "without_data")
    adaptation = adaptation_of(**{name: asked[name] for name in names})
    rest = {name: value for name, value in asked.items() if name not in names}
    return {**rest, "adaptation": adaptation}


def machine_options(command: F) -> F:
    """For ranks on several machines, where no launcher starts them."""
    options = [
        click.option("--nnodes", "--num-nodes", type=int, metavar="N",
                     help=(
                         "The number of machines that share the ranks. Start the same command on "
                         "each."
                     )),
        click.option("--node-rank", "--rank", "machine", type=int, metavar="I",
                     help="The number of this machine, from 0."),
        click.option("--master-addr", "--master-ip", metavar="HOST",
                     help="The address of machine 0."),
        click.option("--master-port", type=int, metavar="PORT",
                     help="A free port on machine 0. [default: 29500]"),
        click.option("--init-method", metavar="URL",
                     help=(
                         "tcp://HOST:PORT or file:///PATH, instead of --master-addr and "
                         "--master-port."
                     )),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command
