"""A report where Python shows a value: in a console, in a notebook, as a dictionary and a table."""

import html.parser
import json
import sys
from types import SimpleNamespace

import pytest

import distcheck
import distcheck.testing
import distcheck.verification.run  # which says how a report shows itself
from distcheck.errors import CannotRunError
from distcheck.records import Report
from distcheck.reports import html_report, terminal
from distcheck.reports.json_report import as_document, render_json
from tests.documents import HOSTILE, hostile, mismatch, passing


def report_of(*cases: distcheck.records.CaseReport) -> Report:
    return Report(environment={"distcheck": "0"}, cases=cases)


def test_a_report_shows_its_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report = report_of(mismatch())
    assert repr(report) == terminal.render_text(report, width=80).rstrip("\n")
    assert "FAIL    mine.py:sync" in repr(report)
    assert max(map(len, repr(report).splitlines())) <= 80
    assert "\x1b" not in repr(report_of(hostile()))
    assert repr(report_of()) == "unknown: no case was judged"


class Tags(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


@pytest.mark.parametrize("case", [passing(), hostile()])
def test_a_notebook_shows_its_page_in_a_sandbox(case: distcheck.records.CaseReport) -> None:
    report = report_of(case)
    ((tag, attributes),) = Tags(report._repr_html_()).found
    assert tag == "iframe"
    assert attributes["sandbox"] is None  # no permission at all
    assert attributes["srcdoc"] == html_report.render(as_document(report))
    assert HOSTILE not in report._repr_html_()


def test_a_dictionary_is_what_the_json_says() -> None:
    report = report_of(passing(), mismatch())
    assert json.loads(render_json(report)) == report.to_dict()
    assert report.to_dict()["verdict"] == "fail"


def test_a_table_has_a_row_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(passing(), mismatch())
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows = report.to_pandas()
    assert [row["check"] for row in rows] == [c.check for case in report.cases for c in case.checks]
    failed, *_ = [row for row in rows if row["verdict"] == "fail"]
    worst = next(c.worst for c in report.cases[1].checks if c.verdict == "fail")
    assert worst is not None
    assert (failed["error"], failed["bound"]) == (worst.error, worst.bound)
    assert (failed["strategy"], failed["causes"]) == ("mine.py:sync", "partial-sync")
    assert len({tuple(row) for row in rows}) == 1
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(CannotRunError, match=r"needs pandas, .+ run pip install pandas"):
        report.to_pandas()


def test_the_real_pandas_makes_a_table_of_it() -> None:
    pandas = pytest.importorskip("pandas")
    table = report_of(passing(), mismatch()).to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert set(table.groupby("case_verdict").size().index) == {"pass", "fail"}


def test_dir_shows_the_public_names() -> None:
    assert dir(distcheck) == sorted(distcheck.__all__)
    assert dir(distcheck.testing) == sorted(distcheck.testing.__all__)
    assert all(getattr(distcheck, name) is not None for name in dir(distcheck))
