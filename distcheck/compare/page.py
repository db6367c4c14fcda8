"""A comparison as one page: how much has changed, then old and new side by side."""

from typing import Any

import msgspec

from distcheck import __version__
from distcheck.compare.records import CaseComparison, RunsComparison
from distcheck.compare.screen import (
    common_changes,
    counted,
    headline,
    of_jobs,
    old_and_new,
)
from distcheck.errors.shown_text import shown
from distcheck.reports.by_module import tree
from distcheck.reports.html_report import page


def render(comparison: RunsComparison, *, command: str) -> str:
    """The page; `command` makes the comparison again."""
    comparison = shown(comparison)
    common = common_changes(comparison)
    made = comparison.made
    return page(
        "comparison.html.jinja",
        verdict=comparison.verdict,
        headline=headline(comparison),
        then=comparison.then,
        now=comparison.now,
        changes=common,
        rows=[
            _row(case) | {"changes": [one for one in case.changes if one not in common]}
            for case in sorted(comparison.cases, key=lambda case: case.bits == "same")
        ],
        command=shown(command),
        saved_to=comparison.saved_to,
        date="" if made is None else made.date,
        version=__version__,
    )


def _row(case: CaseComparison) -> dict[str, Any]:
    first = case.found.first
    row: dict[str, Any] = {
        "id": case.id,
        "verdict": case.verdict,
        "bits": case.bits,
        "reason": case.reason,
    }
    row["lines"] = of_jobs(case)
    found = case.modules
    row["modules"] = [] if found is None else tree(msgspec.to_builtins(found.modules))
    row["first_module"] = "" if found is None else found.first
    if first is None:
        return row | {"place": "", "old": "", "new": "", "apart": "", "tensors": ""}
    old, new = old_and_new(first)
    return row | {
        "place": f"{case.found.kind}: {first.place}",
        "old": old,
        "new": new,
        "apart": "" if first.ulp is None else f"{first.ulp:,} ULP",
        "tensors": counted(case.found),
    }
