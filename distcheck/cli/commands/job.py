"""`distcheck job`: a whole training job, unchanged."""

from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import SECONDS, given_options
from distcheck.reports.files import errors_annotated, output_options, taken_from


@click.command("job", cls=Command, context_settings={"ignore_unknown_options": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND")
@click.option("--world", "--nproc", "nproc", type=int, metavar="N",
              help="Start N ranks of COMMAND by torchrun.")  # fmt: skip
@click.option("--steps", default=8, show_default=True, metavar="N",
              help="Optimizer steps to record.")  # fmt: skip
@click.option("--from-step", default=0, show_default=True, metavar="N",
              help="Optimizer steps that come before them.")  # fmt: skip
@click.option("--budget", default="4GB", show_default=True, metavar="SIZE",
              help="Whole tensors to keep, of all ranks; gradients beyond it as sums.")  # fmt: skip
@click.option("--keep-going", is_flag=True,
              help="Let the job go on after the last recorded step, to its own end.")  # fmt: skip
@click.option("--reference", metavar="COMMAND",
              help="What trains as one process, where the job's own script cannot.")  # fmt: skip
@click.option("--no-reference", is_flag=True, help="Compare with no run as one process.")
@click.option("--weights", type=click.Choice(["samples", "targets", "equal"]), metavar="HOW",
              help="What each rank counts for, where its loss does not say so: samples, targets or "
              "equal.")  # fmt: skip
@click.option("--mesh", default="", metavar="AXES",
              help="How ranks are arranged, where the script has no DeviceMesh that says so: "
              "data=2,tensor=2, with tensor, sequence, pipeline and expert.")  # fmt: skip
@click.option("--resumed-from", metavar="DIR", type=click.Path(),
              help="A recording (--save) of the same job, uninterrupted: does this one resume as "
              "if it had not stopped?")  # fmt: skip
@click.option("--modules", is_flag=True,
              help="Watch every module: which is the first to be wrong, though what it is given is "
              "right?")  # fmt: skip
@click.option("--ops", is_flag=True,
              help="With --save: note every operator that torch runs, so that compare names the "
              "first that gives other bits.")  # fmt: skip
@click.option("--on-cpu", is_flag=True,
              help="Run a script that asks for GPUs on CPUs, over gloo.")  # fmt: skip
@click.option("--accept", multiple=True, metavar="CAUSE",
              help="A deviation that is meant: shared-rng-seed, learning-rate-differs or "
              "scheduler-steps-per-rank.")  # fmt: skip
@click.option(
    "--deadline",
    "deadline_s",
    type=SECONDS,
    default=300.0,
    metavar="TIME",
    help="Time without progress after which the job has hung: 30s, 10m. [default: 5m]",
)
@click.option("--strict", is_flag=True,
              help="Fail for what is a remark otherwise: one seed for the dropout of all ranks, a "
              "learning rate that is scaled by their number.")  # fmt: skip
@click.option("--guard", is_flag=True,
              help="Let the job run to its own end; compare the ranks' replicas.")  # fmt: skip
@click.option("--every", type=int, metavar="N",
              help="With --guard: steps between two checks.  [default: 100]")  # fmt: skip
@click.option("--warn", is_flag=True,
              help="With --guard: let the job go on when ranks differ.")  # fmt: skip
@click.option("--audit", is_flag=True,
              help="With --guard: compare what the optimizer gets with what backward "
              "gave.")  # fmt: skip
@output_options
@click.option("--save", metavar="DIR", type=click.Path(),
              help="Keep the recording in a new folder, for compare and --resumed-from; the "
              "command runs twice more, to measure how far two right runs may part.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Every check, note and table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Verdict lines only.")
def command(words: tuple[str, ...], verbose: bool, quiet: bool, **asked: Any) -> int:
    """Judge a whole training job; not a line of its script is changed.

    \b
    distcheck job -- torchrun --nproc-per-node 4 train.py --batch 32
    distcheck job --world 4 -- python train.py
    distcheck job --keep-going -- accelerate launch --num_processes 2 train.py
    distcheck job --resumed-from whole --world 4 -- python train.py --resume
    distcheck job --guard --every 100 -- torchrun --nproc-per-node 4 train.py

    The command runs as it is given, and the first optimizer steps of every rank are recorded:
    samples, random streams, gradients before and after the exchange, clipping, learning rates,
    parameters. Then they are judged: ranks have different samples, gradients are the mean of the
    ranks', all ranks hold the same model after every step. The job is ended after the last
    recorded step, unless --keep-going is given. Last, the script runs as one process, in a copy of
    the folder, with the samples that the ranks had: each step must reach the same.

    --guard is for production: nothing is recorded, and after step 2 and every 100 steps the ranks
    compare digests of what they hold. --save then names the folder for bundles.
    """  # fmt: skip
    from distcheck.errors import UsageError
    from distcheck.errors.shown_text import say
    from distcheck.job.machines import JudgedThereError
    from distcheck.reports.files import check_outputs, write_outputs
    from distcheck.reports.terminal import console_for, render

    files = taken_from(asked)
    if "-" in files.values():
        raise UsageError("the command writes to standard output as well; give the report a file")
    check_outputs(files)
    with errors_annotated(files):
        try:
            report, code = _run(words, asked, quiet=quiet)
        except JudgedThereError as there:
            say(f"distcheck: {there}", err=True)
            return int(there.exit_code)
    render(report, console_for(), verbose=verbose, quiet=quiet)
    if report.save_error:
        say(f"distcheck: {report.save_error}; the verdict above stands", err=True)
    write_outputs(files, report)
    return code


def _run(words: tuple[str, ...], asked: dict[str, Any], *, quiet: bool) -> tuple[Any, int]:
    from rich.console import Console

    from distcheck.errors import UsageError
    from distcheck.job.settings import bytes_of

    guards, every, warns = asked.pop("guard"), asked.pop("every"), asked.pop("warn")
    audits = asked.pop("audit")
    if guards:
        from distcheck.job import guard_command

        given = given_options() & {*asked} - {"nproc", "save", "accept"}
        if given:
            names = [f"--{name.removesuffix('_s').replace('_', '-')}" for name in sorted(given)]
            raise UsageError(
                f"{', '.join(names)} is for a recording, and --guard makes none; remove it"
            )

        return guard_command.guard_job(
            guard_command.GuardOptions(
                words=words,
                nproc=asked["nproc"],
                every=100 if every is None else every,
                warns=warns,
                save=asked["save"],
                accept=asked["accept"],
                audit=audits,
            )
        )
    if every is not None or warns or audits:
        raise UsageError("--every, --warn and --audit belong to --guard; give --guard as well")
    from distcheck.job.command import judge_job
    from distcheck.job.options import JobOptions
    from distcheck.reports.live import LiveProgress

    live = LiveProgress(Console(stderr=True, quiet=quiet))
    options = JobOptions(words=words, **{**asked, "budget": bytes_of(asked["budget"])})
    report = judge_job(options, live)
    return report, int(report.exit_code)
