"""Merges the reports of a plan's parts, and those of jobs: `distcheck merge`.

It reads the documents as written, and only adds missing items: a planned cell without a report is
unknown. Reports of jobs and replays have no plan: they contain everything that was requested.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from distcheck.errors import ExitCode, UsageError
from distcheck.errors.shown_text import print_displayable
from distcheck.records import Case, CaseReport, exit_code_of_report, verdict_of
from distcheck.records.case import cases_digest
from distcheck.records.run_facts import ExploredSearch
from distcheck.reports.documents import check_document
from distcheck.reports.files import check_outputs, damaged_file_as_usage_error, write_document
from distcheck.reports.findings import summary_lines
from distcheck.reports.json_report import (
    SCHEMA,
    Document,
    decode_document,
    read_document,
    totals_of,
)
from distcheck.reports.terminal import console_for
from distcheck.store.origin import origin_here
from distcheck.verification.contents import not_shown

# Fields that may differ between two runs of the same case.
_OF_THE_MOMENT = ("timings_s", "replay", "strategy_file")
_VERSIONS = ("distcheck", "torch", "python", "cpu")


@dataclass(frozen=True)
class MatrixPart:
    """A report, and its file."""

    file: str
    document: dict[str, Any]


def merge_command(files_in: Sequence[str], *, files: Mapping[str, str], quiet: bool) -> int:
    """Read reports; merge, write and print them. Return the exit code of the merged report."""
    check_outputs(files)
    parts = [read_part(file) for file in dict.fromkeys(files_in)]
    with damaged_file_as_usage_error(*(part.file for part in parts)):
        return show_whole(join(parts), parts, files=files, quiet=quiet)


def read_part(file: str) -> MatrixPart:
    return MatrixPart(file, read_document(Path(file)))


def show_whole(
    whole: dict[str, Any], parts: Sequence[MatrixPart], *, files: Mapping[str, str], quiet: bool
) -> int:
    """Print the merged report and write its files; return its exit code."""
    lines = summary_lines(decode_document(whole), width=console_for().width, quiet=quiet)
    if "-" not in files.values():
        for line in lines:
            print_displayable(line)
        for line in _differences(parts):
            print_displayable(f"distcheck: {line}", err=True)
    write_document(files, whole)
    return int(whole["exit_code"])


def join(parts: Sequence[MatrixPart], lost: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Merge documents; `lost` maps the number of each missing part to the reason. Raises UsageError
    for parts of different or conflicting plans.
    """
    for part in parts:
        check_document(part.document, part.file)
        if not part.document.get("plan") and not part.document.get("made"):
            raise UsageError(
                f"{part.file} has neither a plan nor the command that made it, so missing cases "
                "cannot be found; write the report again"
            )
    of_plan = [part for part in parts if part.document.get("plan")]
    plan = _common_plan(of_plan) if of_plan else None
    planned = {entry["id"]: entry for entry in plan["cases"]} if plan else {}
    assigned, shards = (plan.get("assigned", {}), plan["shards"]) if plan else ({}, 1)
    holders: dict[str, MatrixPart] = {}
    cases: dict[str, dict[str, Any]] = {}
    explored = _explored(plan or {}, parts)
    added = {name for one in explored for name in one["found"]}
    found_by_search: list[dict[str, Any]] = []
    for part in of_plan:
        for case in part.document["cases"]:
            name = case["case"]["id"]
            if name in added:
                found_by_search.append(case)
                continue
            if name not in planned:
                raise UsageError(f"{part.file} has case {name}, which is not in its plan")
            if name in cases:
                _check_alike(name, holders[name], cases[name], part, case)
                continue
            holders[name], cases[name] = part, case
    left_out = {n: why for p in parts for n, why in (p.document.get("left_out") or {}).items()}
    found = [
        cases.get(name) or _missing(entry, assigned.get(name, 1), shards, lost or {})
        for name, entry in planned.items()
        if name in cases or name not in left_out
    ]
    found += found_by_search
    not_in_them = list(not_shown(msgspec.convert(found, list[CaseReport]))) if of_plan else []
    without_plan = [part for part in parts if part not in of_plan]
    found += _without_plan(without_plan, {case["case"]["id"] for case in found})
    not_in_them += [text for part in without_plan for text in part.document.get("not_shown") or ()]
    whole = {
        "schema": SCHEMA,
        "verdict": "unknown",
        "exit_code": 0,
        "totals": totals_of([case["verdict"] for case in found], left_out),
        "made": _made(parts),
        "environment": parts[0].document["environment"],
        "cases": found,
        "plan": {**plan, "shard": 0} if plan else None,
        "left_out": left_out,
        "not_shown": list(dict.fromkeys(not_in_them)),
        "explored": explored,
        "parts": [
            {
                "file": part.file,
                "shard": (part.document.get("plan") or {"shard": 0})["shard"],
                "exit_code": part.document["exit_code"],
                "environment": part.document["environment"],
                "made": part.document.get("made"),
            }
            for part in parts
        ],
    }
    document = msgspec.convert(whole, Document)
    code = int(_exit_code(document, parts))
    return whole | {"verdict": verdict_of(document), "exit_code": code}


def _without_plan(parts: Sequence[MatrixPart], taken: Collection[str]) -> list[dict[str, Any]]:
    """Return the cases of reports without a plan. All jobs use the same case name, so a duplicate
    gets a number.
    """
    found: list[dict[str, Any]] = []
    names = set(taken)
    for case in (case for part in parts for case in part.document["cases"]):
        name, number = case["case"]["id"], 1
        while name in names:
            number += 1
            name = f"{case['case']['id']}-{number}"
        names.add(name)
        found.append({**case, "case": {**case["case"], "id": name}})
    return found


def _made(parts: Sequence[MatrixPart]) -> dict[str, Any]:
    """Return the origin of the whole: merged here and now; the commit, if common to all parts."""
    commits = {
        (made["commit"], made["clean"])
        for part in parts
        for made in [part.document.get("made") or {"commit": "", "clean": None}]
    }
    commit, clean = next(iter(commits)) if len(commits) == 1 else ("", None)
    origin = msgspec.structs.replace(origin_here(), commit=commit, clean=clean)
    made: dict[str, Any] = msgspec.to_builtins(origin)
    return made


def _explored(plan: Mapping[str, Any], parts: Sequence[MatrixPart]) -> list[dict[str, Any]]:
    """Return the extent of every planned search; one in no report is unknown."""
    found = [one for part in parts for one in part.document.get("explored") or []]
    there = Counter(one["strategy"] for one in found)
    for search in plan.get("searches") or []:
        if there[search["strategy"]]:
            there[search["strategy"]] -= 1
            continue
        missing = ExploredSearch(
            strategy=search["strategy"],
            verdict="unknown",
            budget_s=search["budget_s"],
            reason=f"planned in part {search['shard']}, but in no report",
        )
        found.append(msgspec.to_builtins(missing))
    return found


def _common_plan(parts: Sequence[MatrixPart]) -> dict[str, Any]:
    first = parts[0]
    plan: dict[str, Any] = first.document["plan"]
    for part in parts[1:]:
        other = part.document["plan"]
        if other["digest"] != plan["digest"] or other["shards"] != plan["shards"]:
            raise UsageError(
                f"{part.file} has a different plan than {first.file} ({other['digest']} in "
                f"{other['shards']} parts, {plan['digest']} in {plan['shards']}): options, files "
                "or versions differ; merge parts of the same run"
            )
        if _cells_of(other) != _cells_of(plan):
            raise UsageError(
                f"{part.file} and {first.file} have the same plan digest, but different cases; "
                "use the reports as they were written"
            )
    return plan


def _cells_of(plan: Mapping[str, Any]) -> object:
    """Return the cases, without what may differ by machine, and the parts that run them."""
    cases = msgspec.convert(plan["cases"], list[Case])
    return cases_digest(cases), [case.id for case in cases], plan.get("assigned")


def _check_alike(
    name: str, one: MatrixPart, case: Mapping[str, Any], other: MatrixPart, again: Mapping[str, Any]
) -> None:
    keys = [key for key in {**case, **again} if key not in _OF_THE_MOMENT]
    different = [key for key in keys if case.get(key) != again.get(key)]
    if different:
        raise UsageError(
            f"{one.file} and {other.file} both have case {name}, but differ in "
            f"{', '.join(different)} (verdict {case['verdict']} there, {again['verdict']} here); "
            "remove one of them"
        )


def _missing(
    entry: Mapping[str, Any], part: int, shards: int, lost: Mapping[int, str]
) -> dict[str, Any]:
    """Return a placeholder for a planned case in no part, with the keys of every case."""
    where = f" in part {part} of {shards}" if shards > 1 else ""
    why = f": {lost[part]}" if part in lost else ""
    missing = CaseReport(
        case=msgspec.convert(entry, Case), strategy_file="", verdict="unknown", outcomes=(),
        checks=(), notes=(f"planned{where}, but in no report{why}",),
    )  # fmt: skip
    found: dict[str, Any] = msgspec.to_builtins(missing)
    return found


def _exit_code(whole: Document, parts: Sequence[MatrixPart]) -> ExitCode:
    """Return the exit code of one run; CANNOT_RUN if a part could not be saved."""
    code = exit_code_of_report(whole)
    unsaved = any(part.document["exit_code"] == ExitCode.CANNOT_RUN for part in parts)
    stands = code in (ExitCode.MISMATCH, ExitCode.RANK_FAILED)
    return ExitCode.CANNOT_RUN if unsaved and not stands else code


def _differences(parts: Sequence[MatrixPart]) -> list[str]:
    """Return differences between the parts' machines: no verdict depends on them."""
    found = []
    for name in _VERSIONS:
        values = {str(part.document["environment"].get(name)): part.file for part in parts}
        if len(values) > 1:
            said = ", ".join(f"{value} ({file})" for value, file in values.items())
            found.append(f"note: the parts ran with different {name}: {said}")
    return found
