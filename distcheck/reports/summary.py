"""A document in a few lines: how many cases have which verdict, and what did not pass."""

from collections.abc import Mapping
from typing import Any

from distcheck.reports.findings import finding_of, name_of
from distcheck.reports.wording import searches_of


def lines(document: Mapping[str, Any], *, quiet: bool = False) -> list[str]:
    """The lines, not wrapped; the first one alone if `quiet`."""
    cases = document["cases"]
    count = {v: sum(case["verdict"] == v for case in cases) for v in ("fail", "unknown", "pass")}
    counts = [f"{number} {verdict}" for verdict, number in count.items() if number]
    left_out = document.get("left_out") or {}
    counts += [f"{len(left_out)} left out"] if left_out else []
    parts, plan = len(document.get("parts") or ()), document.get("plan")
    of = [f"{len(plan['cases'])} planned cells"] if plan else []
    of += [f"{parts} report{'' if parts == 1 else 's'}"] if parts else []
    about = f"{', '.join(of)}: {', '.join(counts)}" if of else ", ".join(counts)
    found = [f"{document['verdict'].upper():<8}{about}"]
    if quiet:
        return found
    found += [f"  {line}" for line in searches_of(document)]
    for case in cases:
        if case["verdict"] != "pass":
            found += _of_case(case)
    return found


def _of_case(case: Mapping[str, Any]) -> list[str]:
    finding = finding_of(case)
    verdict = case["verdict"].upper()
    found = [f"  {verdict:<8}{case['strategy']}, {name_of(case)}: {finding.headline}"]
    found += [f"          cause   {cause}" for cause in finding.causes]
    return found + ([f"          replay  {finding.replay}"] if finding.replay else [])
