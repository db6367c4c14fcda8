"""Implementation of `distcheck plan`: lists the cases that would run, their shards, and estimated
durations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from distcheck.errors.shown_text import print_displayable
from distcheck.plan.costs import INTERPRETERS_S, START_S, cost_key, estimated_s, measured_s
from distcheck.plan.matrix import Planned
from distcheck.plan.thorough import ThoroughSearch
from distcheck.records import Case
from distcheck.records.layers import BITWISE
from distcheck.reports import json_report
from distcheck.reports.files import check_writable, write_text
from distcheck.store.run_folder import DEFAULT_FOLDER
from distcheck.verification.case_run import is_separate
from distcheck.workloads.cells import CELLS

SCHEMA = "distcheck.plan/1"
# required for every case, whatever its strategy promises
_ALWAYS = ("outcome", "data", "initial state", "gradients", "loss", "agreement")


@dataclass(frozen=True)
class Estimate:
    """Estimated duration of a case in seconds. `recorded` is True if it was measured in an earlier
    run, and False if it comes from a model.
    """

    case: Case
    seconds: float
    recorded: bool


def print_plan_estimate(planned: Planned, *, costs: bool) -> None:
    """Print to standard error, before ranks start, the settings that come from a file and the
    estimated cost of the run.
    """
    if planned.from_file:
        print_displayable(f"distcheck: {planned.file} sets: {planned.from_file}", err=True)
    if not costs:
        return
    recorded = measured_s(DEFAULT_FOLDER)
    estimates = [_estimate(case, recorded) for case in planned.cases]
    worlds = sorted({case.world for case in planned.cases})
    cells = [case for case in planned.cases if case.workload in CELLS]
    several = f"worlds {', '.join(map(str, worlds))}" if len(worlds) > 1 else f"world {worlds[0]}"
    within = ", ".join(map(str, sorted({case.world for case in cells})))
    click.echo(
        f"distcheck: {len(estimates)} cases in {several}"
        + (f", {len(cells)} of them cells in world {within}" if cells else "")
        + "".join(f"; {_format_search(search)}" for search in planned.extras.searches)
        + f"; about {_total_s(estimates, planned):,.0f} s here, {_basis(estimates)}",
        err=True,
    )


def _format_search(search: ThoroughSearch) -> str:
    if search.why_not:
        return f"{search.strategy} {search.why_not}"
    return f"explore {search.strategy} for {search.budget_s:g} s"


def plan_command(planned: Planned, *, json_file: str | None) -> int:
    check_writable(json_file)
    recorded = measured_s(DEFAULT_FOLDER)
    estimates = [_estimate(case, recorded) for case in planned.cases]
    if json_file is not None:
        write_text(json_file, json_report.render(_document(planned, estimates)))
    if json_file != "-":
        for line in _lines(planned, estimates):
            click.echo(line)
    return 0


def _estimate(case: Case, recorded: dict[tuple[Any, ...], float]) -> Estimate:
    seconds = recorded.get(cost_key(case))
    return Estimate(case, estimated_s(case) if seconds is None else seconds, seconds is not None)


def _total_s(estimates: Sequence[Estimate], planned: Planned) -> float:
    """Return the total duration in seconds. It does not include shrinking, which takes up to a
    minute for each failure that a search finds.
    """
    searches_s = sum(each.budget_s for each in planned.extras.searches if not each.why_not)
    start_s = START_S
    if any(is_separate(estimate.case) for estimate in estimates):
        start_s += INTERPRETERS_S
    return start_s + sum(estimate.seconds for estimate in estimates) + searches_s


def _basis(estimates: Sequence[Estimate]) -> str:
    known = sum(estimate.recorded for estimate in estimates)
    if known == len(estimates):
        return "estimated from earlier runs here"
    if not known:
        return "a rough estimate"
    return f"{known} cases are estimated from earlier runs here, the others only roughly"


def _lines(planned: Planned, estimates: Sequence[Estimate]) -> list[str]:
    whole = planned.whole
    part = f", part {whole.shard} of {whole.shards} of {len(planned.every)}" if whole.shard else ""
    source = f" from {planned.file}" if planned.file else ""
    width = max(len(estimate.case.id) for estimate in estimates)
    count = f"{len(estimates)} case{'s' * (len(estimates) != 1)}"
    lines = [f"plan    {count}{source}{part}; digest {whole.digest}"]
    lines.append(f"  {'case':<{width}}  {'batch':>7}  {'steps':>5}  {'seconds':>8}  comparisons")
    for estimate in estimates:
        case = estimate.case
        seconds = f"{'' if estimate.recorded else '~'}{estimate.seconds:,.1f}"
        judged = ", ".join(case.layers) + (", rerun" if case.rerun else "")
        lines.append(
            f"  {case.id:<{width}}  {case.batch:>7,}  {case.steps:>5,}  {seconds:>8}  {judged}"
        )
    lines += [f"  {_format_search(search)}" for search in planned.extras.searches]
    lines.append(f"  about {_total_s(estimates, planned):,.0f} s here, {_basis(estimates)}")
    if any(BITWISE in estimate.case.layers for estimate in estimates):
        lines.append(
            "  bitwise applies if a strategy promises its reduction order; otherwise rounding "
            "replaces it"
        )
    return lines


def _document(planned: Planned, estimates: Sequence[Estimate]) -> dict[str, Any]:
    whole = planned.whole
    return {
        "schema": SCHEMA,
        "config": planned.file or None,
        "digest": whole.digest,
        "shard": whole.shard,
        "shards": whole.shards,
        "planned": len(planned.every),
        "seconds": round(_total_s(estimates, planned), 1),
        "searches": [
            {"strategy": each.strategy, "seconds": each.budget_s, "why_not": each.why_not}
            for each in planned.extras.searches
        ],
        "cases": [
            {
                **{name: getattr(estimate.case, name) for name in _NAMES},
                "layers": list(estimate.case.layers),
                "checks": [*_ALWAYS, *(["rerun"] if estimate.case.rerun else [])],
                "seconds": round(estimate.seconds, 1),
                "basis": "recorded" if estimate.recorded else "rough",
            }
            for estimate in estimates
        ],
    }


_NAMES = (
    "id", "strategy", "world", "backend", "device", "dtype", "workload", "data", "batch", "steps",
    "seed", "deadline_s",
)  # fmt: skip
