"""Renders a report as one self-contained HTML page: no script, no font, no external request.

The page has its own content security policy, `default-src 'none'`, with the digest of its style
sheet. If a server blocks even the style sheet, plain HTML in reading order remains, with pictures
that contain their colors. All texts from the report are escaped.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jinja2
import msgspec
from markupsafe import Markup, escape

from distcheck.errors.shown_text import displayable
from distcheck.judge.checks.merging import earliest_failure
from distcheck.records import Case, CaseReport, CheckResult, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import LAYERS, check_with_layer, layer_label
from distcheck.records.run_facts import ComparedModule
from distcheck.reports import scale
from distcheck.reports.findings import describe_origin, portable_command
from distcheck.reports.json_report import decode_document
from distcheck.reports.pictures import Picture, heat, ledger, timeline
from distcheck.reports.pictures import scale as picture
from distcheck.reports.wording import advice_lines, describe_search, describe_site, format_count

View = dict[str, Any]  # of a case or a check, for the template

_MARKS = {"pass": "✓", "fail": "✕", "unknown": "?"}
_ORDER = ("fail", "unknown", "pass")
_PICTURED_CASES = 24  # beyond, passing cases have no pictures, or the page gets too long
_FIRST_CAUSES = 3  # at the top of the page
_FOLLOWS = "and may follow from it"  # in the reason of a failure that may be a consequence
_BREAKS = re.compile(
    r"([/\\_.,;:=|)\]}](?!\d)|(?<=\w)-(?!\d)|[^\s/\\_.,;:=|)\]}-]{16})"  # not within a number
)
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]{1,30})(?![\w-])")
_OPEN_CASES = 3  # a report with at most so many cases shows them in full
_BAR = 56


def render(document: Mapping[str, Any]) -> str:
    """Render a document as HTML. Raises ValidationError, KeyError, TypeError or ValueError if parts
    of the document are missing.
    """
    read = decode_document(displayable(document))
    cases = read.cases
    few = len(cases) <= _OPEN_CASES
    views = [
        _case_view(
            f"c{at}",
            case,
            name=_name(case, cases),
            opened=few or case.verdict != "pass",
            pictured=len(cases) <= _PICTURED_CASES or case.verdict != "pass",
        )
        for at, case in enumerate(cases)
    ]
    worst_first = sorted(views, key=lambda view: _ORDER.index(view["case"].verdict))
    causes = _causes(worst_first)
    return page(
        "report.html.jinja",
        document=read,
        verdict=read.verdict,
        headline=_headline(cases),
        grid=_grid(views),
        code="script" if all(map(_is_job, cases)) else "strategy",
        cases=worst_first,
        causes=causes[:_FIRST_CAUSES],
        more_causes=max(0, len(causes) - _FIRST_CAUSES),
        environment=_flatten(read.environment),
        since_green=read.since_green,
        origin=describe_origin(read.made),
        searches=list(map(describe_search, read.explored)),
        scaled=_scale_pictures(cases),
    )


def page(template: str, **values: object) -> str:
    """Render a template with the style sheet, and with its digest for the content
    security policy.
    """
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    given = {**values, "style": Markup(style), "style_digest": digest}
    return _environment().get_template(template).render(**given)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("distcheck.reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["soft"] = breakable
    environment.filters["count"] = format_count
    environment.filters["advice"] = advice_lines
    environment.filters["end"] = _end_of_rank
    environment.globals["mark"] = _MARKS
    return environment


def _end_of_rank(outcome: Outcome) -> str:
    first, _, _ = outcome.detail.partition("\n")
    return RankEnd(outcome.outcome).in_words(first)


@cache
def _style() -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), "report.css")[0]


def breakable(text: object) -> Markup:
    """Return text with possible line breaks in long words, so that paths fit a phone. Options get
    none, because browsers break at their hyphens.
    """
    found = []
    for number, part in enumerate(_OPTION.split(str(text))):
        if number % 2:
            found.append(f"<nobr>{escape(part)}</nobr>")
            continue
        pieces = _BREAKS.split(part)
        found += [f"{escape(p)}<wbr>" if i % 2 else escape(p) for i, p in enumerate(pieces)]
    return Markup("".join(found))


def _headline(cases: Sequence[CaseReport]) -> str:
    by_verdict = {name: [c for c in cases if c.verdict == name] for name in _MARKS}
    failed, unknown = by_verdict["fail"], by_verdict["unknown"]
    one = len(cases) == 1
    if not failed and not unknown:
        accepting = sum(1 for case in cases if case.accepted)
        with_what = f", {accepting} of them with an accepted deviation" if accepting else ""
        passed = "The one case passed" if one else f"All {len(cases)} cases passed"
        return f"{'The job passed' if one and _is_job(cases[0]) else passed}{with_what}."
    parts = [f"{len(failed)} of {len(cases)} cases failed"] if failed else []
    parts += [f"{len(unknown)} of {len(cases)} cases are unknown"] if unknown else []
    first = (failed or unknown)[0]
    name = _name(first, cases)
    text = name if one else f"{', '.join(parts)}. First: {name}"
    if first.diagnosis:
        return f"{text}: {first.diagnosis[0].cause}."
    reason = next((check.reason for check in first.checks if check.verdict == first.verdict), "")
    return f"{text}: {reason or 'see below'}."


def _is_job(case: CaseReport) -> bool:
    """Return True for a whole job. It has a script, and none of the settings of a case."""
    return case.case.workload == "job"


def _name(case: CaseReport, among: Sequence[CaseReport]) -> str:
    about, several = case.case, len({other.case.backend for other in among}) > 1
    where = f", {about.backend}" if several else ""
    if _is_job(case):
        return f"{about.strategy}, {about.world} rank{'s' * (about.world != 1)}{where}"
    return f"{about.strategy}, world {about.world}{where}, {about.workload} {about.dtype}"


def _grid(views: list[View]) -> View:
    columns: dict[tuple[str, str], None] = {}
    rows: dict[tuple[str, int, str], dict[tuple[str, str], list[View]]] = {}
    for view in views:
        case: Case = view["case"].case
        column = (case.workload, case.dtype)
        where = case.backend + (f", {case.device}" if case.device != "cpu" else "")
        columns[column] = None
        row = rows.setdefault((case.strategy, case.world, where), {})
        row.setdefault(column, []).append(view)
    return {"columns": list(columns), "rows": rows}


def _case_view(anchor: str, case: CaseReport, *, name: str, opened: bool, pictured: bool) -> View:
    failed = [check for check in case.checks if check.verdict == "fail" and check.first]
    first = earliest_failure(failed)
    return {
        "anchor": anchor,
        "case": case,
        "name": name,
        "is_job": _is_job(case),
        "opened": opened,
        "first": first,
        "first_name": check_with_layer(first.check, first.layer) if first else "",
        "command": portable_command(case),
        "where": describe_site(case.where, case.strategy_file),
        "reasons": _reasons(case.checks),
        "checks": [_check_view(check) for check in case.checks],
        "pictured": pictured,
        "pictures": list(_pictures(anchor, case)) if pictured else [],
        "elements": _elements(case.checks),
        "legend": [
            (name, layer.about)
            for name, layer in LAYERS.items()
            if any(check.layer == name for check in case.checks)
        ],
        "alike": _bit_identical_checks(case.checks),
        "modules": tree(case.modules.modules) if case.modules else [],
        "logs": [o for o in case.outcomes if o.outcome != RankEnd.FINISHED],
        "finished": [o.rank for o in case.outcomes if o.outcome == RankEnd.FINISHED],
    }


def _causes(views: list[View]) -> list[View]:
    """Return each cause once with its cases, in the order of the page."""
    found: dict[str, View] = {}
    for view in views:
        for one in view["case"].diagnosis:
            entry = found.setdefault(one.cause, {**msgspec.structs.asdict(one), "views": []})
            if view not in entry["views"]:
                entry["views"].append(view)
    return list(found.values())


def _reasons(checks: Sequence[CheckResult]) -> list[tuple[str, str, str]]:
    """Return (verdict, names, reason) of the checks. Checks with equal reasons share an entry."""
    names: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        if check.reason:
            name = check_with_layer(check.check, check.layer)
            names.setdefault((check.verdict, check.reason), []).append(name)
    found = [(verdict, ", ".join(who), reason) for (verdict, reason), who in names.items()]
    return sorted(found, key=lambda entry: _ORDER.index(entry[0]))


def _check_view(check: CheckResult) -> View:
    compared = msgspec.structs.asdict(check.compared)
    parts = [
        f"{format_count(compared[what])} {what if compared[what] != 1 else what[:-1]}"
        for what in ("tensors", "ranks", "steps", "elements")
        if compared[what]
    ]
    text, bar = _worst(check)
    return {
        "check": check.check,
        "verdict": check.verdict,
        "layer_name": layer_label(check.layer),
        "compared_text": ", ".join(parts),
        "worst_text": text,
        "bar": bar,
    }


def _worst(check: CheckResult) -> tuple[str, float | None]:
    """Return the largest error relative to its bound: as text, and as the length of a bar if it is
    within the bound.
    """
    worst = check.worst
    if worst is None:
        same = check.verdict == "pass" and check.compared.elements
        return "identical" if same else "", None
    if worst.unit == "":
        return "", None
    error, bound = float(worst.error), float(worst.bound)
    if bound == 0:
        return f"{error:.2g}, bound 0", None
    share = error / bound
    words = f"{error:.1e}, bound {bound:.1e}{' (L2)' * (worst.unit == 'L2 norm')}"
    return words, round(_BAR * share, 1) if share <= 1 else None


def _pictures(anchor: str, case: CaseReport) -> Iterator[Picture]:
    made = (f"{anchor}-p{number}" for number in range(10**6))
    checks = case.checks
    drawn = timeline.draw(next(made), case.outcomes)
    if drawn is not None:
        yield drawn
    if case.ledger is not None:
        yield ledger.draw(next(made), case.ledger)
    for check in checks:
        if _has_map(check, "bound"):
            yield heat.draw_bound(next(made), check)
    for check in checks:
        if _has_map(check, "bits") and (_has_differences(check) or check.check == "gradients"):
            yield heat.draw_bits(next(made), check)


def _scale_pictures(cases: Sequence[CaseReport]) -> list[Picture]:
    """Return a picture of error against world size for each reduction order. Pictures of one
    strategy share axes.
    """
    found = scale.curves(cases)
    alike: dict[tuple[str, str, str, str], list[scale.Curve]] = {}
    for curve in found:
        key = (curve.strategy, curve.workload, curve.dtype, curve.layer)
        alike.setdefault(key, []).append(curve)
    return [
        picture.draw(f"scale-p{number}", curve, beside)
        for number, (curve, beside) in enumerate(
            (curve, beside) for beside in alike.values() for curve in beside
        )
    ]


def _has_map(check: CheckResult, kind: str) -> bool:
    return bool(check.map and check.map.kind == kind and check.map.steps)


def _has_differences(check: CheckResult) -> bool:
    return bool(check.map and any("x" in row for row in check.map.rows))


def _bit_identical_checks(checks: Sequence[CheckResult]) -> list[str]:
    """Return the checks whose results were all bit-identical. They are listed and not drawn."""
    return [
        check_with_layer(check.check, check.layer)
        for check in checks
        if _has_map(check, "bits") and not _has_differences(check) and check.check != "gradients"
    ]


def _elements(checks: Sequence[CheckResult]) -> list[View]:
    """Return the first and the worst element of the failed checks, at the first wrong step, because
    later errors may be consequences. Checks that another one explains are left out.
    """
    failed = [(check, check.first) for check in checks if check.verdict == "fail" and check.first]
    own = [(check, first) for check, first in failed if _FOLLOWS not in check.reason] or failed
    step = min((first.step for _, first in own), default=None)
    return [
        {
            **msgspec.structs.asdict(element),
            "check": check.check,
            "layer": layer_label(check.layer),
            "actual_text": _digits(element.actual, element.actual_bits),
            "expected_text": _digits(element.expected, element.actual_bits),
        }
        for check, first in own
        for element in dict.fromkeys((first, check.worst))
        if element is not None and element.step == step and (element.index or element.actual_bits)
    ]


def _digits(value: float | str, bits: str) -> str:
    """Format a number with enough digits to distinguish numbers of its dtype: 17 for float64, 9 for
    others.
    """
    return value if isinstance(value, str) else f"{value:.{17 if len(bits) > 8 else 9}g}"


def _flatten(environment: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in environment.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, str(value)))
    return found


_DEEPEST = 32  # levels of a tree; deeper modules keep their full name
_TONES = {"wrong": "fail", "follows": "unknown", "near": "pass", "same": "pass", "unseen": "unseen"}
_STATES = {
    "wrong": "inputs match, outputs do not",
    "follows": "differs because its inputs or incoming gradients differ",
    "near": "matches within rounding",
    "same": "bit-identical",
    "unseen": "not compared",
}


class Node(NamedTuple):
    """A module in the module tree, with its submodules. `opened` is True if it or a submodule is
    wrong.
    """

    name: str
    tone: str
    said: str
    kind: str
    opened: bool
    within: "list[Node]"


def tree(modules: Sequence[ComparedModule]) -> list[Node]:
    """Build the module tree from dotted names."""
    return _nodes("", {one.name: one for one in modules}, [one.name for one in modules])


def _nodes(
    above: str, by_name: Mapping[str, ComparedModule], names: Sequence[str], depth: int = 0
) -> list[Node]:
    """Return the nodes directly below a name, given all `names` below it."""
    start = f"{above}." if above else ""
    found: dict[str, list[str]] = {}
    for name in names:
        rest = name.removeprefix(start)
        part = rest.partition(".")[0] if depth < _DEEPEST else rest
        found.setdefault(part, []).append(name)
    nodes = []
    for part, inner in sorted(found.items(), key=lambda item: item[0] != ""):
        full = f"{start}{part}"
        below = [name for name in inner if name != full]
        within = _nodes(full, by_name, below, depth + 1) if part else []
        one = by_name.get(full)
        tone = "unseen" if one is None else _TONES[one.state]
        nodes.append(
            Node(
                name=part or "the model",
                tone=tone,
                said="" if one is None else _describe(one),
                kind="" if one is None else one.kind,
                opened=tone == "fail" or any(node.opened for node in within),
                within=within,
            )
        )
    return nodes


def _describe(one: ComparedModule) -> str:
    times = f", {one.calls} calls" if one.calls > 1 else ""
    far = f", error {one.error:.1e}, bound {one.bound:.1e}" if one.error else ""
    return f"{_STATES[one.state]}{far}{times}"
