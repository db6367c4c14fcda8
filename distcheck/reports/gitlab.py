"""Renders a report for GitLab's code quality widget: a JSON list with an entry for each failure."""

from collections.abc import Mapping
from typing import Any

from distcheck.reports.json_report import render as as_json
from distcheck.reports.sarif import locate_findings

_SEVERITY = {"error": "major", "warning": "minor", "note": "info"}


def render(document: Mapping[str, Any]) -> str:
    entries = [
        {
            "description": one.message,
            "check_name": f"distcheck: {one.rule}",
            "fingerprint": one.fingerprint,
            "severity": _SEVERITY[one.level],
            "location": {"path": one.file or ".", "lines": {"begin": one.line}},
        }
        for one in locate_findings(document)
    ]
    return as_json(entries)
