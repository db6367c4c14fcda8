"""The command line: parse, call, print, exit. Imports nothing heavy until a command runs."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from distcheck import __version__
from distcheck.errors import DistcheckError, ExitCode

F = TypeVar("F", bound=Callable[..., Any])


def main() -> NoReturn:
    """The console script. Every way out is one of `ExitCode`."""
    try:
        code = _group.main(standalone_mode=False, prog_name="distcheck")
    except (KeyboardInterrupt, click.Abort):  # click turns the one into the other
        _complain("interrupted; nothing is left running")
        code = ExitCode.INTERRUPTED
    except click.ClickException as error:
        _complain(error.format_message())
        code = ExitCode.USAGE
    except DistcheckError as error:
        _complain(str(error))
        code = error.exit_code
    except Exception:
        import traceback

        traceback.print_exc()
        _complain("this is a defect of distcheck itself; no verdict was reached")
        code = ExitCode.UNKNOWN
    sys.exit(int(code or 0))


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 pass, 1 mismatch, 2 usage, 3 cannot run, 4 a rank failed, 5 unknown.",
)
@click.version_option(__version__)
def _group() -> None:
    """Does this gradient synchronisation train the same model as one machine would?"""


def _case_options(command: F) -> F:
    """What `verify` and `train` share."""
    options = [
        click.option("--data", default="synthetic", show_default=True, metavar="NAME",
                     help="synthetic, cifar10 or mnist."),
        click.option("--data-dir", metavar="DIR", type=click.Path(),
                     help="Where its files are: their folder, its parent, or the archive. [data]"),
        click.option("--download", is_flag=True, help="Fetch the files if they are not there."),
        click.option("--batch", default=256, show_default=True, metavar="N",
                     help="Samples per step, over all ranks."),
        click.option("--seed", default=0, show_default=True, metavar="N",
                     help="Root of every random stream."),
        click.option("--backend", default="gloo", show_default=True, metavar="NAME"),
        click.option("--device", default="cpu", show_default=True, metavar="NAME"),
        click.option("--deadline-s", default=30.0, show_default=True, metavar="S",
                     help="Idle seconds without progress after which a world has hung."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@_group.command()
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME|FILE.py:OBJ|MOD:OBJ",
    help="What to judge; may be given several times.",
)
@click.option(
    "--world",
    "worlds",
    multiple=True,
    type=int,
    default=(4,),
    show_default=True,
    metavar="N",
    help="Number of ranks; may be given several times.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="What to train; may be given several times. [lattice and cnn]",
)
@click.option(
    "--steps",
    default=3,
    show_default=True,
    metavar="N",
    help="Steps to record; fewer than 3 miss bugs that begin late.",
)
@click.option(
    "--dtype",
    metavar="NAME",
    help="float32, float64, bfloat16 or float16. [float32, and float64 where quick]",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the report as JSON; - for standard output.",
)
@click.option(
    "--save",
    metavar="DIR",
    type=click.Path(),
    help="Keep cases, traces and report in a new folder, for distcheck recheck.",
)
@click.option("-v", "--verbose", is_flag=True, help="Every table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
@_case_options
def verify(
    json_file: str | None,
    save: str | None,
    verbose: bool,
    quiet: bool,
    download: bool,
    **asked: Any,
) -> int:
    """Judge strategies against single-node training at the same total batch.

    \b
    distcheck verify --strategy allreduce --world 4
    distcheck verify --strategy my_sync.py:sync --world 2 --world 3
    """  # fmt: skip
    from distcheck.plan import Request, plan_cases
    from distcheck.runs import verify_command

    cases = plan_cases(Request(download=download, **asked))
    return verify_command(
        cases, save=save, json_file=json_file, verbose=verbose, quiet=quiet, download=download
    )


@_group.command()
@click.argument("case_file", metavar="CASE.json", type=click.Path())
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the report as JSON; - for standard output.",
)
@click.option("--save", metavar="DIR", type=click.Path(), help="Keep everything in a new folder.")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
def replay(case_file: str, json_file: str | None, save: str | None, quiet: bool) -> int:
    """Run one case again, exactly as it was written down."""  # fmt: skip
    from pathlib import Path

    from distcheck.runs import verify_command
    from distcheck.store import read_case

    case = read_case(Path(case_file))
    return verify_command([case], save=save, json_file=json_file, verbose=True, quiet=quiet)


@_group.command()
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the report as JSON; - for standard output.",
)
@click.option("-v", "--verbose", is_flag=True, help="Every table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
def recheck(folder: str, json_file: str | None, verbose: bool, quiet: bool) -> int:
    """Judge a saved run again; starts no rank."""  # fmt: skip
    from distcheck.runs import recheck_command

    return recheck_command(folder, json_file=json_file, verbose=verbose, quiet=quiet)


@_group.command("list")
def list_() -> None:
    """Strategies, workloads, data sets and checks, one line each."""
    from distcheck.catalogue import catalogue

    for heading, entries in catalogue():
        click.echo(heading)
        width = max((len(name) for name, _ in entries), default=0)
        for name, summary in entries:
            click.echo(f"  {name:<{width}}  {summary}")


@_group.command()
@click.option(
    "--strategy",
    metavar="NAME|FILE.py:OBJ|MOD:OBJ",
    help="How to synchronise; without it one process trains alone.",
)
@click.option("--world", type=int, default=None, metavar="N", help="Number of ranks. [1, or 4]")
@click.option("--workload", default="vgg11", show_default=True, metavar="NAME")
@click.option("--epochs", default=1, show_default=True, metavar="N")
@click.option("--steps", type=int, metavar="N", help="Stop every epoch after N steps.")
@click.option("--dtype", default="float32", show_default=True, metavar="NAME")
@click.option(
    "--log-every",
    default=20,
    show_default=True,
    metavar="N",
    help="Print the running loss every N steps; 0 for never.",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the figures as JSON; - for standard output.",
)
@_case_options
def train(**asked: Any) -> int:
    """Plain training with a strategy: loss, accuracy and seconds per step.

    \b
    distcheck train --data cifar10 --data-dir ~/data
    distcheck train --data cifar10 --data-dir ~/data --strategy ddp --world 4
    """  # fmt: skip
    from distcheck.train import train_command

    return train_command(**asked)


@_group.command()
def doctor() -> int:
    """Versions, machine, calibration and what can run here; made to be pasted."""
    from distcheck.doctor import doctor_command

    return doctor_command()


def _complain(message: str) -> None:
    click.echo(f"distcheck: {message}", err=True)
