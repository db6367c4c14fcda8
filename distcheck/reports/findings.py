"""What went wrong with a case, in the words of its JSON: for formats that have a few lines each."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from distcheck.records import CallSite
from distcheck.records.ends import RankEnd
from distcheck.records.layers import named
from distcheck.reports.wording import describe_site

Entry = Mapping[str, Any]  # of `cases` in a document


@dataclass(frozen=True)
class CaseGist:
    """The gist of a case that did not pass. Empty texts where there is nothing to say."""

    headline: str  # one line
    first: str  # the first divergence, or what was not compared
    where: str  # the line that the causes are about
    causes: tuple[str, ...]
    suggestions: tuple[str, ...]
    ranks: tuple[tuple[str, str], ...]  # of those that failed: "rank 2 raised", and the detail
    replay: str  # a line that needs no file of the machine that ran the case


def name_of(case: Entry) -> str:
    """What tells a cell from the others, the strategy aside."""
    device = "" if case["device"] == "cpu" else f", {case['device']}"
    seed = f", seed {case['seed']}" if case["seed"] else ""
    about = f"world {case['world']}, {case['backend']}{device}, {case['workload']} {case['dtype']}"
    return about + seed


def names_of(cases: Sequence[Entry]) -> list[str]:
    """Names of cells that no two of a strategy share: with the id where `name_of` is not enough."""
    names = [(case["strategy"], name_of(case)) for case in cases]
    times = Counter(names)
    return [
        name if times[strategy, name] == 1 else f"{name}, {case['id']}"
        for (strategy, name), case in zip(names, cases, strict=True)
    ]


def ranks_failed(case: Entry) -> bool:
    """Whether a rank crashed, hung or was lost, and not by a defect of distcheck's own: exit code
    4, not 1.
    """
    own = any(check["check"] == "outcome" and check.get("defect") for check in case["checks"])
    return not own and any(o["outcome"] != RankEnd.FINISHED for o in case["outcomes"])


def finding_of(case: Entry) -> CaseGist:
    """What a person reads first of a case."""
    failed = [(f"rank {o['rank']} {o['outcome']}", o["detail"]) for o in case["outcomes"]
              if o["outcome"] != RankEnd.FINISHED]  # fmt: skip
    check = _earliest(case)
    first = ""
    if check is not None:
        first = f"{named(check['check'], check['layer'])}: {check['reason'] or check['verdict']}"
    headline = (
        failed[0][0] if ranks_failed(case) else first or "; ".join(case["notes"]) or case["verdict"]
    )
    return CaseGist(
        headline=" ".join(headline.split()),
        first=first,
        where=describe_site(site_of(case), case["strategy_file"]),
        causes=tuple(f"{d['cause']}: {d['evidence']}" for d in case["diagnosis"]),
        suggestions=tuple(d["suggestion"] for d in case["diagnosis"] if d["suggestion"]),
        ranks=tuple(failed),
        replay=case.get("command") or case["replay"],
    )


def site_of(case: Entry) -> CallSite | None:
    """The line that its causes are about, where it is known."""
    return msgspec.convert(case["where"], CallSite) if case.get("where") else None


def describe_origin(document: Entry) -> str:
    """Where a report comes from, in a line: its date, its commit and its command; "" where it was
    made before these were recorded.
    """
    made = document.get("made")
    if not made:
        return ""
    state = {True: "", False: " with changes", None: " (changes not known)"}[made["clean"]]
    parts = [made["date"].replace("T", " ")]
    parts += [f"commit {made['commit'][:12]}{state}"] if made["commit"] else []
    parts += [made["command"]] if made["command"] else []
    return " · ".join(parts)


def spent_s(case: Entry) -> float:
    """Seconds of worlds and judges, one after the other."""
    return float(sum(case["timings_s"].values()))


def _earliest(case: Entry) -> Entry | None:
    """The failed check that diverges first, by step and then in the order of the checks; of none
    failed, the first that is unknown.
    """
    for verdict in ("fail", "unknown"):
        found: list[Entry] = [c for c in case["checks"] if c["verdict"] == verdict]
        if found:
            return min(found, key=lambda c: c["first"]["step"] if c.get("first") else math.inf)
    return None
