"""Reports of `distcheck train`: a JSON document; a screen with a line per epoch and the failed
ranks; an HTML page with a table of the runs and their curves.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from distcheck.errors.shown_text import displayable, one_line
from distcheck.records import Case, Outcome
from distcheck.records.decoding import read_distcheck_document
from distcheck.reports.failures import describe_rank_exits
from distcheck.reports.html_report import page
from distcheck.reports.pictures import curves
from distcheck.reports.wrapping import VERDICT, LabeledLines, print_verdict, wrap_hanging

SCHEMA = "distcheck.training/1"


class TrainedCase(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a training run. A run without a `strategy` used a single process."""

    strategy: str
    world: int
    workload: str
    data: str
    batch: int
    seed: int
    dtype: str


class TrainedEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an epoch. A loss of None was not finite."""

    loss: float | None
    accuracy: float | None
    tested: int
    mean_step_s: float
    step_losses: tuple[float | None, ...] = ()
    step_s: tuple[float, ...] = ()


class TrainedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A training run: settings, epochs and environment."""

    schema: str
    case: TrainedCase
    epochs: tuple[TrainedEpoch, ...]


def read_training(path: Path) -> TrainedRun:
    """Read the document that `train --json` has written. Raises UsageError."""
    return read_distcheck_document(
        path, TrainedRun, schema=SCHEMA, name=f"--overlay {path}",
        why="has no measurements of distcheck train: {error}; pass a file that distcheck train "
            "--json wrote",
    )  # fmt: skip


_MOST_TRACEBACK = 4  # lines of a rank's


def format_heading(case: Case, torch: object, *, width: int) -> Iterator[str]:
    case = displayable(case)
    how = f"{case.strategy}, {case.world} ranks" if case.strategy else "one process"
    text = (
        f"{case.workload} on {case.data}, {how}: batch {case.batch}, seed {case.seed}, "
        f"{case.dtype}, 1 thread per rank, torch {torch}"
    )
    yield from wrap_hanging(one_line(text), width, first="train", indent=VERDICT)


def epoch(row: Mapping[str, Any], epochs: int, *, width: int) -> Iterator[str]:
    """Format the figures of an epoch. `row` is its entry in the document."""
    accuracy = "not measured"  # some buffers of the model are complete on no rank
    if row["tested"]:
        accuracy = f"{100 * row['accuracy']:.2f}% on {row['tested']:,} test samples"
    timed = max(row["steps"] - 1, 1)
    steps = f"{timed} step{'s' * (timed > 1)}{', without the first' * (row['steps'] > 1)}"
    text = (
        f"loss {row['loss']:.4f}, accuracy {accuracy}, {row['mean_step_s']:.3f} s per step (mean "
        f"of {steps}; median {row['median_step_s']:.3f}, max {row['max_step_s']:.3f})"
    )
    name = f"epoch {row['epoch']}/{epochs}:"
    yield from wrap_hanging(text, width, first=f"{name} ", indent=len(name) + 1)


def print_failure(case: Case, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the failed ranks, their errors, and the command that finds the cause."""
    case = displayable(case)
    ranks = f"{case.world} rank{'s' * (case.world != 1)}"
    name = case.strategy or case.workload
    print_verdict(f"{name}   {ranks}", "fail", console, bold="")
    lines = LabeledLines(console)
    for label, text in describe_rank_exits(
        displayable(list(outcomes)), lines=_MOST_TRACEBACK, says_cut=False
    ):
        lines.add(label, text, most=2 * _MOST_TRACEBACK)
    lines.print()
    if case.strategy:
        words = ["distcheck", "verify", "--strategy", case.strategy, *case.adapter_options]
        words += ["--world", str(case.world)]
        console.print(Text(f"next   {shlex.join(words)}    # reports the cause"), soft_wrap=True)


_SHARED = ("workload", "data", "batch", "seed", "dtype")


def render(runs: Sequence[TrainedRun], *, version: str) -> str:
    """Render the runs in order, numbered from 1. `version` is the version of distcheck."""
    rows = [_row(number, run) for number, run in enumerate(runs, 1)]
    cases = [msgspec.to_builtins(run.case) for run in runs]
    apart = [name for name in _SHARED if len({case[name] for case in cases}) > 1]
    names = [_name_of(row, rows) for row in rows]
    pictures = tuple(
        curves.draw(name, what, unit, [of(run) for run in runs], runs=names, shares=of is _accuracy)
        for name, what, unit, of in (
            ("loss", "loss", "step", _losses_by_step),
            ("accuracy", "accuracy", "epoch", _accuracy),
            ("seconds", "seconds per step", "step", _seconds),
        )
    )
    values: dict[str, Any] = {"rows": rows, "apart": apart, "version": version}
    shared = ", ".join(f"{n} {cases[0][n]}" for n in _SHARED if n not in apart)
    values |= {"headline": f"{len(runs)} run{'s' * (len(runs) != 1)}: {shared}"}
    return page("training.html.jinja", **displayable(values), pictures=[p for p in pictures if p])


def _name_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the name of a run. If several runs have the same settings, it includes the number of
    the run.
    """
    alike = [one for one in rows if (one["how"], one["world"]) == (row["how"], row["world"])]
    ranks = f", {row['world']} ranks" if row["world"] > 1 else ""
    number = f" ({row['number']})" if len(alike) > 1 else ""
    return f"{row['how']}{ranks}{number}"


def _row(number: int, run: TrainedRun) -> dict[str, Any]:
    case, last = run.case, run.epochs[-1] if run.epochs else None
    found = {
        "number": number,
        "how": case.strategy or "one process",
        **{name: getattr(case, name) for name in ("world", *_SHARED)},
    }
    if last is None:
        return found | {"loss": "-", "accuracy": "-", "seconds": "-"}
    return found | {
        "loss": "not finite" if last.loss is None else f"{last.loss:.4f}",
        "accuracy": "-" if last.accuracy is None else f"{100 * last.accuracy:.2f}%",
        "seconds": f"{last.mean_step_s:.3f}",
    }


def _losses_by_step(run: TrainedRun) -> list[float | None]:
    """Return the loss of every step or, if steps are not recorded, of every epoch."""
    return [loss for epoch in run.epochs for loss in epoch.step_losses or (epoch.loss,)]


def _accuracy(run: TrainedRun) -> list[float | None]:
    return [epoch.accuracy for epoch in run.epochs]


def _seconds(run: TrainedRun) -> list[float | None]:
    """Return the seconds per step, without the first step of the run, which includes setup."""
    found = [spent for epoch in run.epochs for spent in epoch.step_s or (epoch.mean_step_s,)]
    return [None, *found[1:]] if len(found) > 1 else list(found)
