"""Renders a report as JUnit XML: a test suite for each strategy, a test case for each cell.

A failed cell is a <failure>. A cell with crashed or hung ranks, or an unknown verdict, is an
<error>. A cell that does not apply to its strategy is <skipped>. Services identify test cases by
`classname` and `name`, and drop duplicates, so no two test cases share both.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import msgspec

from distcheck.errors.shown_text import displayable
from distcheck.records import Case, CaseReport, Origin
from distcheck.records.layers import check_with_layer
from distcheck.records.run_facts import ExploredSearch
from distcheck.reports.findings import cell_names, failure_summary
from distcheck.reports.json_report import Document, decode_document

# Characters that XML 1.0 cannot represent, not even as a reference.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(document: Mapping[str, Any]) -> str:
    found = decode_document(displayable(document))
    root = ElementTree.Element("testsuites", name="distcheck")
    suites: dict[str, list[ElementTree.Element]] = defaultdict(list)
    for case, name in zip(found.cases, cell_names(found.cases), strict=True):
        suites[case.case.strategy].append(_test_case(case, name))
    for planned, reason in _left_out(found):
        element = ElementTree.Element("testcase", classname=_valid(planned.strategy))
        element.set("name", _valid(planned.id))
        ElementTree.SubElement(element, "skipped", message=_valid(reason))
        suites[planned.strategy].append(element)
    for explored in found.explored:
        suites[explored.strategy].append(_search(explored))
    for strategy, elements in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": _valid(strategy)})
        suite.attrib |= _count_results(elements)
        _note_origin(suite, found.made)
        suite.extend(elements)
    root.attrib |= _count_results([element for elements in suites.values() for element in elements])
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _note_origin(suite: ElementTree.Element, made: Origin | None) -> None:
    """Add the date of the report as an attribute of the suite, and its origin as properties. In
    JUnit XML, properties come first in a suite.
    """
    if not made:
        return
    suite.set("timestamp", _valid(made.date[: len("2026-01-31T12:00:00")]))
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in msgspec.structs.asdict(made).items():
        if value not in ("", None):
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            ElementTree.SubElement(properties, "property", name=name, value=_valid(shown))


def _search(explored: ExploredSearch) -> ElementTree.Element:
    """Return the test case of a search. Cases that the search has found have their own
    test cases.
    """
    about = {"classname": _valid(explored.strategy), "name": "explore"}
    element = ElementTree.Element("testcase", about)
    element.set("time", f"{explored.spent_s:.3f}")
    kind = {"fail": "failure", "unknown": "error", "not run": "skipped"}.get(explored.verdict)
    if kind is not None:
        found = ", ".join(explored.found)
        ElementTree.SubElement(element, kind, message=_valid(explored.reason or found))
    return element


def _left_out(document: Document) -> list[tuple[Case, str]]:
    planned = document.plan.cases if document.plan else ()
    reasons = document.left_out
    return [(cell, reasons[cell.id]) for cell in planned if cell.id in reasons]


def _test_case(case: CaseReport, name: str) -> ElementTree.Element:
    named = {"classname": _valid(case.case.strategy), "name": _valid(name)}
    element = ElementTree.Element("testcase", named)
    element.set("time", f"{sum(case.timings_s.values()):.3f}")
    if case.strategy_file:
        element.set("file", _valid(case.strategy_file))
    if case.strategy_line:
        element.set("line", str(case.strategy_line))
    remarks = case.remarks
    said = [f"warning: {d.cause}: {d.evidence}; {d.suggestion}" for d in remarks]
    if case.verdict == "pass":
        if said:
            ElementTree.SubElement(element, "system-out").text = _valid("\n".join(said) + "\n")
        return element
    found = failure_summary(case)
    failed = case.verdict == "fail" and not case.ranks_failed
    kind = case.diagnosis[0].cause if case.diagnosis else case.verdict
    wrong = ElementTree.SubElement(element, "failure" if failed else "error")
    wrong.set("type", _valid(kind))
    wrong.set("message", _valid(found.headline))
    wrong.text = _valid(_failures(case))
    about = [
        *([f"first: {found.first}"] if found.first else []),
        *([f"where: {found.where}"] if found.where else []),
        *(f"cause: {cause}" for cause in found.causes),
        *(f"try: {suggestion}" for suggestion in found.suggestions),
        *([f"replay: {found.replay}"] if found.replay else []),
        *said,
    ]
    ElementTree.SubElement(element, "system-out").text = _valid("\n".join(about) + "\n")
    if found.ranks:
        details = "\n\n".join(f"{rank}\n{detail}" for rank, detail in found.ranks)
        ElementTree.SubElement(element, "system-err").text = _valid(details + "\n")
    return element


def _failures(case: CaseReport) -> str:
    """Return a line for every check that did not pass, and the notes."""
    lines = [
        f"{check.verdict} {check_with_layer(check.check, check.layer)}: {check.reason}"
        for check in case.checks
        if check.verdict != "pass"
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in case.notes)]) + "\n"


def _count_results(elements: list[ElementTree.Element]) -> dict[str, str]:
    count = {
        plural: sum(element.find(tag) is not None for element in elements)
        for plural, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    seconds = sum(float(element.get("time", "0")) for element in elements)
    numbers = {name: str(number) for name, number in count.items()}
    return {"tests": str(len(elements)), **numbers, "time": f"{seconds:.3f}"}


def _valid(text: str) -> str:
    return _NOT_XML.sub("", text)
