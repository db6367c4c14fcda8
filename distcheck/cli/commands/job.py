"""`distcheck job`: judges an unmodified training job."""

from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import SECONDS, given_options
from distcheck.reports.files import errors_annotated, output_options, pop_output_files


@click.command("job", cls=Command, context_settings={"ignore_unknown_options": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND")
@click.option("--world", "--nproc", "nproc", type=int, metavar="N",
              help="World size: start N ranks of COMMAND with torchrun.")  # fmt: skip
@click.option("--steps", default=8, show_default=True, metavar="N",
              help="Number of optimizer steps to record.")  # fmt: skip
@click.option("--from-step", default=0, show_default=True, metavar="N",
              help="Number of optimizer steps to skip before recording.")  # fmt: skip
@click.option("--budget", default="4GB", show_default=True, metavar="SIZE",
              help="Memory for whole tensors of all ranks; of each further gradient, only 64 "
              "weighted sums of its elements are kept.")  # fmt: skip
@click.option("--keep-going", is_flag=True,
              help="Let the job continue after the last recorded step until it exits.")  # fmt: skip
@click.option("--reference", metavar="COMMAND",
              help="Command that trains in a single process, if the script cannot.")  # fmt: skip
@click.option(
    "--no-reference",
    is_flag=True,
    help="Compare ranks only with each other, without a single-process reference.",
)
@click.option("--weights", type=click.Choice(["samples", "targets", "equal"]), metavar="HOW",
              help="Quantity by which ranks are weighted, if their losses do not determine it: "
              "samples, targets or equal.")  # fmt: skip
@click.option("--mesh", default="", metavar="AXES",
              help="Mesh of the ranks, if the script has no DeviceMesh, such as data=2,tensor=2. "
                   "The "
              "axes are data, tensor, sequence, pipeline and expert.")  # fmt: skip
@click.option("--resumed-from", metavar="DIR", type=click.Path(),
              help="Recording (--save) of the same job without interruption: check that this job "
              "resumes as if it had never stopped.")  # fmt: skip
@click.option("--twice", is_flag=True,
              help="Run the job twice, and report the first step, module, operator and line at "
              "which the two runs diverge, and why.")  # fmt: skip
@click.option("--modules", is_flag=True,
              help="Record every module, to find the first whose inputs match but whose outputs "
              "do not.")  # fmt: skip
@click.option("--ops", is_flag=True,
              help="With --save: record every torch operator, so that compare reports the first "
              "one that diverges.")  # fmt: skip
@click.option("--on-cpu", is_flag=True,
              help="Run a script that requests GPUs on CPUs, over gloo.")  # fmt: skip
@click.option("--accept", multiple=True, metavar="CAUSE",
              help="Intended deviation to accept: shared-rng-seed, learning-rate-differs or "
              "scheduler-steps-per-rank.")  # fmt: skip
@click.option(
    "--deadline",
    "deadline_s",
    type=SECONDS,
    default=300.0,
    metavar="TIME",
    help="Time without progress after which the job counts as hung: 30s, 10m. [default: 5m]",
)
@click.option("--strict", is_flag=True,
              help="Treat warnings as failures, such as the same dropout seed on all ranks, or a "
              "learning rate scaled by the world size.")  # fmt: skip
@click.option("--guard", is_flag=True,
              help="Let the job run until it exits, and compare the ranks' replicas.")  # fmt: skip
@click.option("--every", type=int, metavar="N",
              help="With --guard: number of steps between two checks.  [default: 100]")  # fmt: skip
@click.option("--warn", is_flag=True,
              help="With --guard: let the job continue when ranks differ.")  # fmt: skip
@click.option("--audit", is_flag=True,
              help="With --guard: compare the gradients passed to the optimizer with those of "
              "backward.")  # fmt: skip
@output_options
@click.option("--save", metavar="DIR", type=click.Path(),
              help="Save the recording in a new folder, for compare and --resumed-from; the "
              "command is rerun twice to measure the noise floor.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Print every check, note and table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict lines.")
def command(words: tuple[str, ...], verbose: bool, quiet: bool, **asked: Any) -> int:
    """Check an unmodified training job.

    \b
    distcheck job -- torchrun --nproc-per-node 4 train.py --batch 32
    distcheck job --world 4 -- python train.py
    distcheck job --keep-going -- accelerate launch --num_processes 2 train.py
    distcheck job --resumed-from whole --world 4 -- python train.py --resume
    distcheck job --twice -- torchrun --nproc-per-node 4 train.py
    distcheck job --guard --every 100 -- torchrun --nproc-per-node 4 train.py

    The command runs unchanged, and distcheck records the first optimizer steps of every rank:
    samples, RNG streams, local and reduced gradients, clipping, learning rates, parameters. It
    checks that ranks have different samples, that gradients are the mean of the local gradients,
    and that all ranks hold the same model after every step. The job ends after the last recorded
    step, unless --keep-going is passed. Finally the script runs in a single process, in a copy of
    the folder, on the samples of all ranks: each step must yield the same result.

    --guard is for production: nothing is recorded, and after step 2 and every 100 steps the ranks
    compare digests of their replicas. --save then sets the folder for bundles.
    """  # fmt: skip
    from distcheck.errors import UsageError
    from distcheck.errors.shown_text import print_displayable
    from distcheck.job.machines import JudgedThereError
    from distcheck.reports.files import check_outputs, write_outputs
    from distcheck.reports.terminal import console_for, render

    files = pop_output_files(asked)
    if "-" in files.values():
        raise UsageError(
            "the command writes to standard output as well; pass a file for the report"
        )
    check_outputs(files)
    with errors_annotated(files):
        try:
            report, code = _run(words, asked, quiet=quiet)
        except JudgedThereError as there:
            print_displayable(f"distcheck: {there}", err=True)
            return int(there.exit_code)
    render(report, console_for(), verbose=verbose, quiet=quiet)
    if report.save_error:
        print_displayable(
            f"distcheck: {report.save_error}; the verdict above is unaffected", err=True
        )
    write_outputs(files, report)
    return code


def _run(words: tuple[str, ...], asked: dict[str, Any], *, quiet: bool) -> tuple[Any, int]:
    from rich.console import Console

    from distcheck.errors import UsageError
    from distcheck.job.settings import parse_size

    guards, every, warns = asked.pop("guard"), asked.pop("every"), asked.pop("warn")
    audits = asked.pop("audit")
    if guards:
        from distcheck.job import guard_command

        given = given_options() & {*asked} - {"nproc", "save", "accept"}
        if given:
            names = [f"--{name.removesuffix('_s').replace('_', '-')}" for name in sorted(given)]
            raise UsageError(
                f"{', '.join(names)} requires a recording, but --guard makes none; remove it"
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
        raise UsageError("--every, --warn and --audit require --guard; pass --guard as well")
    from distcheck.job.command import judge_job
    from distcheck.job.options import JobOptions
    from distcheck.reports.live import LiveProgress

    live = LiveProgress(Console(stderr=True, quiet=quiet))
    asked |= {"budget": parse_size(asked["budget"]), "weights": asked["weights"] or ""}
    options = JobOptions(words=words, **asked)
    report = judge_job(options, live)
    return report, int(report.exit_code)
