"""Renders a report as SARIF 2.1.0, for code scanning: a rule for each cause, a result for each
failure.

Paths are relative to the checkout (`GITHUB_WORKSPACE`, or the current folder). The fingerprint of a
result depends on its cause and case, so that a service recognizes the result in the next run.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distcheck.errors.shown_text import displayable
from distcheck.records.causes import causes
from distcheck.reports.causes import cause_explanation
from distcheck.reports.findings import cell_name, failure_summary, source_place
from distcheck.reports.json_report import decode_document
from distcheck.reports.json_report import render as as_json

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_UNKNOWN = "unknown"  # the rule of a case that could not be judged
_ROOT = "%SRCROOT%"


@dataclass(frozen=True)
class LocatedFinding:
    """A failure, an unknown case or a warning, with the line of code to which it refers."""

    rule: str  # a cause, or "unknown"
    level: str  # of SARIF: error, warning or note
    message: str
    file: str  # relative to the checkout if it is in it; "" if unknown
    line: int
    fingerprint: str


def locate_findings(document: Mapping[str, Any]) -> Iterator[LocatedFinding]:
    """Yield every cause of each case that did not pass, and every warning of the others."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    for case in decode_document(displayable(document)).cases:
        found = failure_summary(case)
        given = [(one, "error") for one in case.diagnosis]
        given += [(one, "warning") for one in case.remarks]
        told = [(one.cause, level, f"{one.cause}: {one.evidence}\ntry: {one.suggestion}")
                for one, level in given]  # fmt: skip
        if case.verdict == "fail" and not case.diagnosis:
            told.append(("unexplained", "error", found.headline))
        elif case.verdict == "unknown":
            told.append((_UNKNOWN, "warning", found.headline))
        for rule, level, text in told:
            lines = [f"{case.case.strategy}, {cell_name(case.case)}: {case.verdict}", text]
            lines += [f"first: {found.first}"] * bool(found.first)
            lines += [f"replay: {found.replay}"] * bool(found.replay)
            key = hashlib.sha256(f"{rule}\0{case.case.id}".encode("utf-8", "replace")).hexdigest()
            yield LocatedFinding(rule, level, "\n".join(lines), *source_place(case, root), key[:32])


def render(document: Mapping[str, Any]) -> str:
    results = list(locate_findings(document))
    names = list(dict.fromkeys(one.rule for one in results))
    driver = {
        "name": "distcheck",
        "version": str(document["environment"].get("distcheck") or "unknown"),
        "rules": [_rule(name) for name in names],
    }
    entries = [_result(one, names.index(one.rule)) for one in results]
    run = {"tool": {"driver": driver}, "results": entries, "columnKind": "unicodeCodePoints"}
    return as_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(name: str) -> dict[str, Any]:
    cause = causes().get(name)
    if cause is None:
        what = "a planned comparison was not made, so nothing is known about it"
        return {"id": name, "shortDescription": {"text": what}}
    return {
        "id": name,
        "shortDescription": {"text": cause.what.replace("`", "")},
        "fullDescription": {"text": f"{cause.what}; {cause.repair}".replace("`", "")},
        "help": {"text": "\n".join(cause_explanation(cause))},
    }


def _result(one: LocatedFinding, index: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": one.rule,
        "ruleIndex": index,
        "level": one.level,
        "message": {"text": one.message},
        "partialFingerprints": {"distcheck/v1": one.fingerprint},
    }
    if one.file:
        artifact = {"uri": quote(one.file), "uriBaseId": _ROOT}
        if Path(one.file).is_absolute():
            artifact = {"uri": f"file://{quote(one.file)}"}
        place = {"artifactLocation": artifact, "region": {"startLine": max(one.line, 1)}}
        result["locations"] = [{"physicalLocation": place}]
    return result
