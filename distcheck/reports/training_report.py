"""The figures of `distcheck train` as one page: a table of the runs, and their curves."""

from collections.abc import Sequence
from typing import Any

import msgspec

from distcheck.errors.shown_text import shown
from distcheck.records.training_runs import TrainedRun
from distcheck.reports.html_report import page
from distcheck.reports.pictures import curves

_SHARED = ("workload", "data", "batch", "seed", "dtype")


def render(runs: Sequence[TrainedRun], *, version: str) -> str:
    """The runs, in their order, numbered from 1; `version` is that of distcheck."""
    rows = [_row(number, run) for number, run in enumerate(runs, 1)]
    cases = [msgspec.to_builtins(run.case) for run in runs]
    apart = [name for name in _SHARED if len({case[name] for case in cases}) > 1]
    names = [_name_of(row, rows) for row in rows]
    pictures = tuple(
        curves.draw(name, what, unit, [of(run) for run in runs], runs=names, shares=of is _accuracy)
        for name, what, unit, of in (
            ("loss", "loss", "step", _of_steps),
            ("accuracy", "accuracy", "epoch", _accuracy),
            ("seconds", "seconds per step", "step", _seconds),
        )
    )
    values: dict[str, Any] = {"rows": rows, "apart": apart, "version": version}
    shared = ", ".join(f"{n} {cases[0][n]}" for n in _SHARED if n not in apart)
    values |= {"headline": f"{len(runs)} run{'s' * (len(runs) != 1)}: {shared}"}
    return page("training.html.jinja", **shown(values), pictures=[p for p in pictures if p])


def _name_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """How a run trained; with its number where several trained alike."""
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
        "accuracy": "-" if last.accuracy is None else f"{100 * last.accuracy:.2f} %",
        "seconds": f"{last.mean_step_s:.3f}",
    }


def _of_steps(run: TrainedRun) -> list[float | None]:
    """The loss of every step; of a file without them, that of every epoch."""
    return [loss for epoch in run.epochs for loss in epoch.step_losses or (epoch.loss,)]


def _accuracy(run: TrainedRun) -> list[float | None]:
    return [epoch.accuracy for epoch in run.epochs]


def _seconds(run: TrainedRun) -> list[float | None]:
    """Without the first step of all, which builds what later ones use again."""
    found = [spent for epoch in run.epochs for spent in epoch.step_s or (epoch.mean_step_s,)]
    return [None, *found[1:]] if len(found) > 1 else list(found)
