"""`distcheck scale` without ranks: what it plans, what it says of errors, and its pictures."""

import io
import math
import re
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from distcheck.addons.simulated.scale import plan_scale, render
from distcheck.cli import root_command
from distcheck.errors import UsageError
from distcheck.records import Case, CaseReport, Difference, Report
from distcheck.reports import html_report, scale
from distcheck.reports.json_report import as_document, decode_document, read_document, render_json
from tests import documents
from tests.stored import compare
from tests.unit.test_html_report import Page

ASKED: dict[str, Any] = {
    "strategies": ("allreduce",), "dtype": "float32", "batch": None, "workload": None,
    "steps": None,
}  # fmt: skip


def planned(worlds: str | None, orders: str | None = None, **more: Any) -> list[Case]:
    return plan_scale({**ASKED, **more}, worlds=worlds, orders=orders)


def test_every_world_has_the_batch_of_the_largest_and_a_sample_for_each_rank() -> None:
    cases = planned("1024,2", "tree,ring")
    assert [(c.world, c.backend, c.batch) for c in cases] == [
        (2, "simulated:tree", 1024), (2, "simulated:ring", 1024),
        (1024, "simulated:tree", 1024), (1024, "simulated:ring", 1024),
    ]  # fmt: skip
    assert {c.batch for c in planned("2,64")} == {256}
    assert len({c.id for c in cases}) == 4
    assert len(planned(None)) == 4 * 5


@pytest.mark.parametrize(
    ("worlds", "orders", "more", "said"),
    [
        ("2,x", None, {}, r"--world '2,x' is not a list of world sizes"),
        ("", None, {}, r"--world '' is not a list"),
        ("²", None, {}, r"--world '²' is not a list"),
        ("1,2", None, {}, r"--world: 1 is out of range; a world takes 2 to 4096"),
        ("2,5000", None, {}, r"5000 is out of range"),
        ("2", "rign", {}, r"unknown order 'rign' \(did you mean ring\?\); known are gloo"),
        ("2", None, {"strategies": ()}, r"no strategy was given"),
        ("2,8", None, {"batch": 4}, r"--batch 4 is smaller than --world 8"),
    ],
)
def test_bad_input(worlds: str, orders: str | None, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(worlds, orders, **more)


def test_bad_input_has_an_exit_code() -> None:
    ran = CliRunner().invoke(root_command, ["scale", "--strategy", "allreduce", "--world", "0"])
    assert isinstance(ran.exception, UsageError)
    assert ran.exception.exit_code == 2


def judged(order: str, world: int, error: float | str, bound: float, verdict: str) -> CaseReport:
    done = documents.passing("mine.py:sync", world) if verdict == "pass" else documents.mismatch()
    worst = Difference(
        parameter=documents.HOSTILE, rank=1, step=0, index=(3,), actual=1.0, expected=2.0,
        error=error, bound=bound,
    )  # fmt: skip
    checks = tuple(
        msgspec.structs.replace(c, worst=worst if c.layer == "rounding" else None)
        for c in done.checks
    )
    case = msgspec.structs.replace(
        done.case, world=world, id=f"{order}-{world}", backend=f"simulated:{order}"
    )
    return msgspec.structs.replace(done, case=case, checks=checks)


def grown() -> list[CaseReport]:
    return [
        *(judged("ring", w, 1e-9 * w, 1e-8, "pass" if w < 16 else "fail") for w in (16, 2, 8)),
        *(judged("tree", w, 1e-9 * math.log2(w), 1e-8, "pass") for w in (2, 8, 16)),
    ]


def test_a_curve_has_its_worlds_in_order_and_names_the_first_that_fails() -> None:
    ring, tree = scale.curves(decode_document(documents.document(*grown())).cases)
    assert [(p.world, p.error, p.verdict) for p in ring.points] == [
        (2, 2e-9, "pass"), (8, 8e-9, "pass"), (16, 1.6e-8, "fail"),
    ]  # fmt: skip
    assert ring.comes_to == (
        "first fails at world size 16 (partial-sync); the next smaller world size tested is 8"
    )
    assert tree.comes_to == "passes at all 3 world sizes from 2 to 16"
    assert ring.points[-1].share == pytest.approx(1.6)


def test_what_is_unknown_is_no_pass_and_says_why() -> None:
    reports = [judged("tree", 2, 1e-9, 1e-8, "pass"), judged("tree", 8, 1e-9, 1e-8, "pass")]
    reports[1] = msgspec.structs.replace(
        reports[1], verdict="unknown", checks=(), outcomes=(), notes=("so no bound exists",)
    )
    (curve,) = scale.curves(decode_document(documents.document(*reports)).cases)
    assert curve.comes_to == "does not fail, but is unknown at world size 8"
    assert (curve.points[1].error, curve.points[1].reason) == (None, "so no bound exists")
    text = screen(reports)
    assert "UNKNOWN mine.py:sync   tree does not fail" in text
    assert "world size 8 (tree): so no bound exists" in text


@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_looks_as_it_did(width: int) -> None:
    compare(f"scale-{width}.txt", screen(grown(), width=width))


def screen(reports: list[CaseReport], *, width: int = 100) -> str:
    stream = io.StringIO()
    render(
        Report(environment=documents.ENVIRONMENT, cases=tuple(reports)),
        Console(file=stream, width=width, highlight=False, color_system=None),
    )
    return stream.getvalue()


def test_the_screen_has_error_and_bound_of_each_world_and_order() -> None:
    text = screen(grown())
    assert re.search(r"ring +2 +ok +2\.0e-09 +1\.0e-08 +0\.2\n", text)
    assert re.search(r"\n +16 +fail +1\.6e-08 +1\.0e-08 +1\.6\n", text)
    assert "FAIL    mine.py:sync   ring first fails at world size 16 (partial-sync)" in text
    assert "PASS    mine.py:sync   tree passes at all 3 world sizes from 2 to 16" in text
    assert "ring, world size 16" in text
    assert "try " in text


def test_the_page_has_a_picture_for_each_order_on_the_same_axes() -> None:
    document = documents.document(*grown())
    seen = Page(html_report.render(document))
    for words in (
        "Error against world size: order ring",
        "Error against world size: order tree",
        "first fails at world size 16 (partial-sync)",
        "A cross marks a world that fails",
    ):
        assert words in seen.visible, words
    pictures = re.findall(r"<svg [^>]*scale-p\d-t.*?</svg>", seen.text, re.S)
    assert len(pictures) == 2
    assert [p.count('class="over"') for p in pictures] == [1, 0]
    axes = [re.findall(r">(1e[+-]\d+)<", p) for p in pictures]
    assert axes[0] == axes[1] == ["1e-9", "1e-8", "1e-7"]
    assert not seen.all("script", "img")


@pytest.mark.parametrize("error", ["nan", "inf", 0.0])
def test_an_error_that_has_no_place_on_the_axis_is_still_shown(error: float | str) -> None:
    reports = [judged("ring", 2, 1e-9, 1e-8, "pass"), judged("ring", 8, error, 1e-8, "fail")]
    seen = Page(html_report.render(documents.document(*reports)))
    assert "at the upper edge, a world without an error to draw" in seen.visible
    assert seen.text.count('class="over"') >= 1
    assert "first fails at world size 8" in screen(reports)


def test_worlds_of_other_backends_have_no_curve_and_no_key() -> None:
    document = documents.document(documents.passing("a", 2), documents.passing("a", 4))
    assert "scale" not in document
    assert "Error against world size" not in html_report.render(document)


def test_the_json_has_a_row_for_each_world_and_order_and_can_be_read_again(tmp_path: Any) -> None:
    report = Report(environment=documents.ENVIRONMENT, cases=tuple(grown()))
    rows = as_document(report)["scale"]
    assert [(r["order"], r["world"], r["verdict"]) for r in rows][2] == ("ring", 16, "fail")
    assert set(rows[0]) == {
        "strategy", "workload", "dtype", "order", "world", "verdict", "layer", "error", "bound",
        "where", "cause", "reason",
    }  # fmt: skip
    file = tmp_path / "report.json"
    file.write_text(render_json(report))
    html_report.render(read_document(file))
