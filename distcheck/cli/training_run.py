"""Implementation of `distcheck train`: trains with a strategy, and reports loss, accuracy and time.

`verify` records the same training loop. Each rank, and the single process, computes with one
thread, so that durations are comparable.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from distcheck import __version__
from distcheck.cli.under_launchers import end_other_processes, pool_for_launch
from distcheck.errors import DistcheckError, ExitCode, UsageError
from distcheck.errors.shown_text import print_displayable
from distcheck.plan import cases as plan
from distcheck.plan.settings import Request
from distcheck.records import Case, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.reports import json_report, training_report
from distcheck.reports.files import check_outputs, write_text
from distcheck.reports.terminal import console_for
from distcheck.reports.training_report import SCHEMA, TrainedRun, print_failure, read_training
from distcheck.training.jobs import TRAIN, EpochFigures, RunningLoss, TrainRequest
from distcheck.verification import own_code, preparation
from distcheck.worlds import root_cause
from distcheck.worlds.launch import Ranks, refusal_of, run_until_over, start_world
from distcheck.worlds.launchers import Launch
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.shares import Shared


def train_command(
    *,
    json_file: str | None,
    html_file: str | None,
    overlay: Sequence[str],
    download: bool,
    launch: Launch | None = None,
    **asked: Any,
) -> int:
    """Train, and print a line per epoch. Return the exit code. `asked` are the arguments of
    `plan_training`.
    """
    case = plan_training(**asked)
    earlier = [read_training(Path(path)) for path in overlay]
    if overlay and html_file is None:
        raise UsageError("--overlay draws earlier runs on the page of --html; pass --html FILE")
    check_outputs({k: v for k, v in (("json", json_file), ("html", html_file)) if v is not None})
    pool = pool_for_launch(launch, [case])
    try:
        table, failed = _train(pool, case, asked, download=download)
        first = f"rank {failed[0].rank} {failed[0].outcome}, {failed[0].detail}" if failed else ""
        end_other_processes(pool, int(ExitCode.RANK_FAILED if failed else ExitCode.PASS), first)
    except DistcheckError as error:
        end_other_processes(pool, int(error.exit_code), str(error))
        raise
    finally:
        pool.close()
    if failed:
        print_failure(case, failed, console_for(sys.stderr))
        return int(ExitCode.RANK_FAILED)
    document = msgspec.json.encode({"schema": SCHEMA, "case": case, "epochs": table})
    if json_file is not None:
        write_text(json_file, json_report.render(msgspec.json.decode(document)))
    if html_file is not None:
        runs = [*earlier, msgspec.json.decode(document, type=TrainedRun)]
        write_text(html_file, training_report.render(runs, version=__version__), option="--html")
    return int(ExitCode.PASS)


def plan_training(
    *,
    strategy: str | None,
    world: int | None,
    workload: str,
    epochs: int,
    steps: int | None,
    dtype: str,
    log_every: int,
    **options: Any,
) -> Case:
    """Return the training run as a case. Raises UsageError or CannotRunError."""
    for option, value, least in (
        ("--epochs", epochs, 1), ("--steps", steps, 1), ("--log-every", log_every, 0),
    ):  # fmt: skip
        if value is not None and value < least:
            raise UsageError(f"{option} {value} is out of range; it takes {least} or more")
    if strategy is None and world not in (None, 1):
        raise UsageError(
            f"--world {world} needs a --strategy; without one, a single process trains"
        )
    if options["adaptation"].without_data:
        raise UsageError(
            "--without-data is not supported by train, because every rank needs a shard; use "
            "distcheck verify"
        )
    size = world or (4 if strategy else 1)
    request = Request(
        strategies=(strategy or "allreduce",),
        worlds=(size,),
        workloads=(workload,),
        dtype=dtype,
        steps=1,
        **options,
    )
    case = plan.plan_cases(request)[0]  # on a GPU, the others are for comparison
    if workload == "exact":
        raise UsageError("workload exact has no accuracy; pass mlp, cnn or vgg11")
    return msgspec.structs.replace(case, strategy=strategy or "")


def _train(
    pool: Pool, case: Case, asked: Mapping[str, Any], *, download: bool
) -> tuple[list[dict[str, Any]], list[Outcome]]:
    pool.wait_ready()
    table = _Table(case, asked["epochs"])
    with preparation.load_shared_dataset(pool, case.data, case.data_dir, download=download) as data:
        inspected = msgspec.structs.replace(case, strategy=case.strategy or "allreduce")
        facts = preparation.inspect(pool, [inspected], data)
        if data.note:
            print_displayable(f"note: {data.note}", err=True)

        def request(rendezvous: Rendezvous) -> TrainRequest:
            return TrainRequest(
                case=case,
                rendezvous=rendezvous,
                description=data.description,
                epochs=asked["epochs"],
                steps=asked["steps"],
                log_every=asked["log_every"],
            )

        table.head(facts.environment)
        ranks = Ranks(
            job=TRAIN,
            backend=case.backend,
            size=case.world,
            request=request,
            deadline_s=case.deadline_s,
        )
        fds = {"data": Shared(fd=data.fd, kind="data")} if data.fd is not None else {}
        world = start_world(pool, ranks, fds=fds)
        for child in world.children:
            child.on_said = table.hear
        run_until_over(pool, world)
        failed = [
            outcome
            for outcome in root_cause.rank_outcomes(world.children, hung=world.hung)
            if outcome.outcome != RankEnd.FINISHED
        ]
        defect = own_code.defect_in_rank(case, world.children, hung=world.hung) if failed else None
        world.close()
        refused = refusal_of(world)
        if refused is not None:  # an indivisible model shows only when a rank builds it
            raise refused
        if defect is not None:
            raise defect
    return ([], failed) if failed else (table.rows, [])


class _Table:
    """Prints an epoch when all ranks have sent their figures for it."""

    def __init__(self, case: Case, epochs: int) -> None:
        self._case, self._epochs = case, epochs
        self._heard: dict[int, list[EpochFigures]] = defaultdict(list)
        self.rows: list[dict[str, Any]] = []
        self._width = console_for().width

    def head(self, environment: dict[str, Any]) -> None:
        self._print_lines(
            training_report.format_heading(self._case, environment["torch"], width=self._width)
        )

    def hear(self, payload: bytes) -> None:
        said = msgspec.msgpack.decode(payload, type=EpochFigures | RunningLoss)
        if isinstance(said, RunningLoss):
            click.echo(
                f"  epoch {said.epoch + 1}/{self._epochs}, step {said.step}/{said.steps}: "
                f"loss {said.loss:.4f} (rank 0)"
            )
            return
        heard = self._heard[said.epoch]
        heard.append(said)
        if len(heard) == self._case.world:
            self._print(heard)

    def _print(self, figures: list[EpochFigures]) -> None:
        first = min(figures, key=lambda f: f.rank)
        loss = sum(f.loss_sum for f in figures) / sum(f.samples for f in figures)
        timed = list(first.step_s[1:]) or list(first.step_s)
        row: dict[str, Any] = {
            "epoch": first.epoch + 1,
            "loss": loss,
            "accuracy": first.correct / first.tested if first.tested else None,
            "tested": first.tested,
            "steps": len(first.step_s),
            "first_step_s": first.step_s[0],
            "median_step_s": statistics.median(timed),
            "mean_step_s": statistics.fmean(timed),
            "max_step_s": max(timed),
            "step_losses": _step_losses(figures),
            "step_s": list(first.step_s),
        }
        self.rows.append(row)
        self._print_lines(training_report.epoch(row, self._epochs, width=self._width))

    def _print_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            click.echo(line)


def _step_losses(figures: Sequence[EpochFigures]) -> list[float | None]:
    """Return the mean loss of the global batch at every step; None for a step at which no rank has
    a loss.
    """
    found: list[float | None] = []
    for step in range(min(len(one.losses) for one in figures)):
        having = [one for one in figures if one.sizes[step]]
        samples = sum(one.sizes[step] for one in having)
        total = sum(one.losses[step] * one.sizes[step] for one in having)
        found.append(total / samples if samples else None)
    return found
