"""The report as SARIF 2.1.0, for code scanning: a rule for each cause, a result for each failure.

Paths are relative to the checkout (`GITHUB_WORKSPACE`, or the current folder). A result has a
fingerprint of its cause and case, so that a service recognizes it in the next run.
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
from distcheck.reports.findings import finding_of, name_of, place_of
from distcheck.reports.json_report import decoded
from distcheck.reports.json_report import render as as_json

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_UNKNOWN = "unknown"  # the rule of a case that could not be judged
_ROOT = "%SRCROOT%"


@dataclass(frozen=True)
class Located:
    """A failure, an unknown case or a warning, with the line that it concerns."""

    rule: str  # a cause, or "unknown"
    level: str  # of SARIF: error, warning or note
    message: str
    file: str  # relative to the checkout if it is in it; "" if unknown
    line: int
    fingerprint: str


def located(document: Mapping[str, Any]) -> Iterator[Located]:
    """Yield every cause of each case that did not pass, and every warning of the others."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    for case in decoded(displayable(document)).cases:
        found = finding_of(case)
        given = [(one, "error") for one in case.diagnosis]
        given += [(one, "warning") for one in case.remarks]
        told = [(one.cause, level, f"{one.cause}: {one.evidence}\ntry: {one.suggestion}")
                for one, level in given]  # fmt: skip
        if case.verdict == "fail" and not case.diagnosis:
            told.append(("unexplained", "error", found.headline))
        elif case.verdict == "unknown":
            told.append((_UNKNOWN, "warning", found.headline))
        for rule, level, text in told:
            lines = [f"{case.case.strategy}, {name_of(case.case)}: {case.verdict}", text]
            lines += [f"first: {found.first}"] * bool(found.first)
            lines += [f"replay: {found.replay}"] * bool(found.replay)
            key = hashlib.sha256(f"{rule}\0{case.case.id}".encode("utf-8", "replace")).hexdigest()
            yield Located(rule, level, "\n".join(lines), *place_of(case, root), key[:32])


def render(document: Mapping[str, Any]) -> str:
    results = list(located(document))
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


def _result(one: Located, index: int) -> dict[str, Any]:
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
