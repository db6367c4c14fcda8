"""The report as one self-contained page: no script, no font, no external request.

The page has its own policy, `default-src 'none'`, with the digest of its style sheet. If a server
blocks even that, plain HTML in a sensible order remains, with pictures that include their colors.
All contents of the report are escaped.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup, escape

from distcheck.errors.shown_text import shown
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64, LAYERS, named, shown_layer
from distcheck.reports import scale
from distcheck.reports.by_module import tree
from distcheck.reports.document import CaseEntry, decoded
from distcheck.reports.findings import describe_origin
from distcheck.reports.pictures import Picture, agreement, heat, histogram, losses, timeline
from distcheck.reports.pictures import scale as picture
from distcheck.reports.wording import count, describe_search, describe_site

Document = dict[str, Any]

_MARKS = {"pass": "✓", "fail": "✕", "unknown": "?"}
_ORDER = ("fail", "unknown", "pass")
_PICTURED_CASES = 24  # beyond, passing cases have no pictures, or the page gets too long
_ELEMENTS = 5  # of one check; the JSON has more
_FIRST_CAUSES = 3  # at the top of the page
_FOLLOWS = "and may follow from it"  # in the reason of a failure that may be a consequence
_BREAKS = re.compile(
    r"([/\\_.,;:=|)\]}](?!\d)|(?<=\w)-(?!\d)|[^\s/\\_.,;:=|)\]}-]{16})"  # not within a number
)
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]{1,30})(?![\w-])")
_OPEN_CASES = 3  # a report with at most so many cases shows them in full
_BAR = 56


def render(document: Document) -> str:
    """Render a document as HTML. Raises ValidationError, KeyError, TypeError or ValueError for one
    with missing parts.
    """
    document = shown(document)
    read, cases = decoded(document), document["cases"]
    few = len(cases) <= _OPEN_CASES
    views = [
        _case_view(
            f"c{at}",
            case,
            where=describe_site(entry.where or None, entry.strategy_file),
            name=_name(case, cases),
            opened=few or case["verdict"] != "pass",
            pictured=len(cases) <= _PICTURED_CASES or case["verdict"] != "pass",
        )
        for at, (case, entry) in enumerate(zip(cases, read.cases, strict=True))
    ]
    worst_first = sorted(views, key=lambda view: _ORDER.index(view["case"]["verdict"]))
    causes = _causes(worst_first)
    return page(
        "report.html.jinja",
        document=document,
        verdict=document["verdict"],
        headline=_headline(cases),
        grid=_grid(views),
        code="script" if all(map(_is_job, cases)) else "strategy",
        cases=worst_first,
        causes=causes[:_FIRST_CAUSES],
        more_causes=max(0, len(causes) - _FIRST_CAUSES),
        environment=_flat(document["environment"]),
        since_green=document.get("since_green"),
        origin=describe_origin(read.made),
        searches=list(map(describe_search, read.explored)),
        scaled=_scaled(read.cases),
    )


def page(template: str, **values: object) -> str:
    """Render a template with the style sheet, and its digest for the page's policy."""
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
    environment.filters["count"] = count
    environment.globals["mark"] = _MARKS
    return environment


@cache
def _style() -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), "report.css")[0]


def breakable(text: object) -> Markup:
    """Return text with possible breaks in long words, so that paths fit a phone; options get none,
    since browsers break at their hyphens.
    """
    found = []
    for number, part in enumerate(_OPTION.split(str(text))):
        if number % 2:
            found.append(f"<nobr>{escape(part)}</nobr>")
            continue
        pieces = _BREAKS.split(part)
        found += [f"{escape(p)}<wbr>" if i % 2 else escape(p) for i, p in enumerate(pieces)]
    return Markup("".join(found))


def _headline(cases: list[Document]) -> str:
    by_verdict = {name: [c for c in cases if c["verdict"] == name] for name in _MARKS}
    failed, unknown = by_verdict["fail"], by_verdict["unknown"]
    one = len(cases) == 1
    if not failed and not unknown:
        accepting = sum(1 for case in cases if case.get("accepted"))
        with_what = f", {accepting} of them with an accepted deviation" if accepting else ""
        passed = "The one case passed" if one else f"All {len(cases)} cases passed"
        return f"{'The job passed' if one and _is_job(cases[0]) else passed}{with_what}."
    parts = [f"{len(failed)} of {len(cases)} cases failed"] if failed else []
    parts += [f"{len(unknown)} of {len(cases)} cases are unknown"] if unknown else []
    first = (failed or unknown)[0]
    causes = first.get("diagnosis") or []
    name = _name(first, cases)
    text = name if one else f"{', '.join(parts)}. First: {name}"
    if causes:
        return f"{text}: {causes[0]['cause']}."
    reason = next((c["reason"] for c in first["checks"] if c["verdict"] == first["verdict"]), "")
    return f"{text}: {reason or 'see below'}."


def _is_job(case: Document) -> bool:
    """Return True for a whole job, which has a script and no settings of a case."""
    return bool(case["workload"] == "job")


def _name(case: Document, among: list[Document]) -> str:
    several = len({other["backend"] for other in among}) > 1
    where = f", {case['backend']}" if several else ""
    if _is_job(case):
        return f"{case['strategy']}, {case['world']} rank{'s' * (case['world'] != 1)}{where}"
    return f"{case['strategy']}, world {case['world']}{where}, {case['workload']} {case['dtype']}"


def _grid(views: list[Document]) -> Document:
    columns: dict[tuple[str, str], None] = {}
    rows: dict[tuple[str, int, str], dict[tuple[str, str], list[Document]]] = {}
    for view in views:
        case = view["case"]
        column = (case["workload"], case["dtype"])
        where = case["backend"] + (f", {case['device']}" if case["device"] != "cpu" else "")
        columns[column] = None
        row = rows.setdefault((case["strategy"], case["world"], where), {})
        row.setdefault(column, []).append(view)
    return {"columns": list(columns), "rows": rows}


def _case_view(
    anchor: str, case: Document, *, name: str, where: str, opened: bool, pictured: bool
) -> Document:
    failed = [c for c in case["checks"] if c["verdict"] == "fail"]
    return {
        "anchor": anchor,
        "case": case,
        "name": name,
        "is_job": _is_job(case),
        "opened": opened,
        "first": (first := _first(failed)),
        "first_name": named(first["check"], first["layer"]) if first else "",
        "where": where,
        "reasons": _reasons(case["checks"]),
        "checks": [_check_view(check) for check in case["checks"]],
        "pictured": pictured,
        "pictures": list(_pictures(anchor, case)) if pictured else [],
        "elements": _elements(_of_the_cause(case["checks"])),
        "legend": [
            (name, layer.about)
            for name, layer in LAYERS.items()
            if any(check["layer"] == name for check in case["checks"])
        ],
        "alike": _alike(case["checks"]),
        "modules": tree(case["modules"]["modules"]) if case.get("modules") else [],
        "logs": [o for o in case["outcomes"] if o["outcome"] != RankEnd.FINISHED],
        "finished": [o["rank"] for o in case["outcomes"] if o["outcome"] == RankEnd.FINISHED],
    }


def _causes(views: list[Document]) -> list[Document]:
    """Return each cause once with its cases, in page order."""
    found: dict[str, Document] = {}
    for view in views:
        for one in view["case"]["diagnosis"]:
            entry = found.setdefault(one["cause"], {**one, "views": []})
            if view not in entry["views"]:
                entry["views"].append(view)
    return list(found.values())


def _first(failed: list[Document]) -> Document | None:
    """Return the failed check that diverges first; ties go to the order of the checks."""
    found = [check for check in failed if check.get("first")]
    return min(found, key=lambda check: int(check["first"]["step"]), default=None)


def _reasons(checks: list[Document]) -> list[tuple[str, str, str]]:
    """Return verdict, names and reason: one entry for all checks with equal reasons."""
    names: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        if check["reason"]:
            name = named(check["check"], check["layer"])
            names.setdefault((check["verdict"], check["reason"]), []).append(name)
    found = [(verdict, ", ".join(who), reason) for (verdict, reason), who in names.items()]
    return sorted(found, key=lambda entry: _ORDER.index(entry[0]))


def _check_view(check: Document) -> Document:
    compared = check["compared"]
    parts = [
        f"{count(compared[what])} {what if compared[what] != 1 else what[:-1]}"
        for what in ("tensors", "ranks", "steps", "elements")
        if compared[what]
    ]
    shown_as = {"layer_name": shown_layer(check["layer"]), "compared_text": ", ".join(parts)}
    return {**check, **shown_as, **_worst(check)}


def _worst(check: Document) -> Document:
    """Return the worst error against its bound: as text, and as a bar if it is within."""
    worst = check["worst"]
    if worst is None:
        same = check["verdict"] == "pass" and check["compared"]["elements"]
        return {"worst_text": "identical" if same else "", "bar": None}
    if worst["unit"] == "":
        return {"worst_text": "", "bar": None}
    error, bound = float(worst["error"]), float(worst["bound"])
    if bound == 0:
        return {"worst_text": f"{error:.2g} over 0", "bar": None}
    share = error / bound
    words = f"{error:.1e} {'of' if share <= 1 else 'over'} {bound:.1e}"
    words += " (L2)" if worst["unit"] == "L2 norm" else ""
    return {"worst_text": words, "bar": round(_BAR * share, 1) if share <= 1 else None}


def _pictures(anchor: str, case: Document) -> Iterator[Picture]:
    made = (f"{anchor}-p{number}" for number in range(10**6))
    checks = case["checks"]
    drawn = timeline.draw(next(made), case["outcomes"])
    if drawn is not None:
        yield drawn
    for check in checks:
        if _has_map(check, "bound"):
            yield heat.draw_bound(next(made), check)
    for check in checks:
        if _has_map(check, "bits") and (_differs(check) or check["check"] == "gradients"):
            yield heat.draw_bits(next(made), check)
    with_loss = [check for check in checks if check.get("loss")]
    if with_loss:
        full = [check for check in with_loss if check["layer"] in (IN_FLOAT32, IN_FLOAT64)]
        yield losses.draw(next(made), (full or with_loss)[-1])
    for check in checks:
        if check["check"] == "gradients" and histogram.shows_something(check):
            yield histogram.draw(next(made), check)
    for check in checks:
        if check.get("digests"):
            yield agreement.draw(next(made), check)


def _scaled(cases: list[CaseEntry]) -> list[Picture]:
    """Return a picture of error against world size per order; those of a strategy share axes."""
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


def _has_map(check: Document, kind: str) -> bool:
    found = check.get("map")
    if not found:
        return False
    return bool(found["kind"] == kind and found["steps"])


def _differs(check: Document) -> bool:
    return any("x" in row for row in check["map"]["rows"])


def _alike(checks: list[Document]) -> list[str]:
    """Return checks whose bits were all equal: listed, not drawn."""
    return [
        named(check["check"], check["layer"])
        for check in checks
        if _has_map(check, "bits") and not _differs(check) and check["check"] != "gradients"
    ]


def _of_the_cause(checks: list[Document]) -> list[Document]:
    """Return the failed checks that no other explains, each with its elements at the first wrong
    step: later ones may be consequences.
    """
    failed = [check for check in checks if check["verdict"] == "fail"]
    own = [check for check in failed if _FOLLOWS not in check["reason"]]
    if not any(check.get("elements") for check in own):
        return failed if any(check.get("elements") for check in failed) else checks
    first = min(e["step"] for check in own for e in check.get("elements", []))
    return [
        {**check, "elements": [e for e in check.get("elements", []) if e["step"] == first]}
        for check in own
    ]


def _elements(checks: list[Document]) -> list[Document]:
    return [
        {
            **element,
            "check": check["check"],
            "layer": shown_layer(check["layer"]),
            "actual_text": _digits(element["actual"], element["actual_bits"]),
            "expected_text": _digits(element["expected"], element["actual_bits"]),
        }
        for check in checks
        for element in check.get("elements", [])[:_ELEMENTS]
        if element["index"] or element["actual_bits"]
    ]


def _digits(value: float | str, bits: str) -> str:
    """Format enough digits to distinguish numbers of the dtype: 17 for float64, 9 for others."""
    return value if isinstance(value, str) else f"{value:.{17 if len(bits) > 8 else 9}g}"


def _flat(environment: Document, prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in environment.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, str(value)))
    return found
