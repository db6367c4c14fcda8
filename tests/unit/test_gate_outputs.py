"""What services are told: JUnit and GitHub; all of it made from documents."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcheck.errors import CannotRunError, UsageError
from distcheck.records import Report
from distcheck.reports import github, junit
from distcheck.reports.files import check_outputs, errors_annotated
from distcheck.reports.findings import describe_origin
from distcheck.reports.json_report import as_document, decode_document
from tests.unit.gate_documents import ALL, PASSED, case_report, document_of, parsed


def test_junit_tells_mismatch_crash_and_unknown_apart() -> None:
    root = ElementTree.fromstring(junit.render(document_of(*ALL)).encode())
    assert root.attrib == {
        "name": "distcheck", "tests": "4", "failures": "1", "errors": "2", "skipped": "0",
        "time": "3.000",
    }  # fmt: skip
    cells = {(c.get("classname"), c.get("name")): c for c in root.iter("testcase")}
    assert len(cells) == 4
    passed = cells["ddp", "world 2, gloo, mlp float32"]
    assert list(passed) == []
    assert passed.get("time") == "0.750"
    failed = cells["sync.py:f", "world 2, gloo, mlp float32"]
    assert [child.tag for child in failed] == ["failure", "system-out"]
    assert failed[0].get("type") == "missing-division"
    out = failed.findtext("system-out") or ""
    assert "first: gradients (rounding): step 2, fc.weight[0,3], rank 1: " in out
    assert "cause: missing-division: twice the mean" in out
    assert "replay: distcheck verify --strategy sync.py:f --world 2 --workload mlp" in out
    assert (failed.get("file"), failed.get("line")) == ("/there/repo/sync.py", "8")
    crashed = cells["sync.py:f", "world 3, gloo, mlp float32"]
    assert [child.tag for child in crashed] == ["error", "system-out", "system-err"]
    assert crashed[0].get("message") == "rank 1 raised"
    assert "boom" in (crashed.findtext("system-err") or "")
    unknown = cells["sync.py:f", "world 4, gloo, mlp float32"]
    assert [child.tag for child in unknown] == ["error", "system-out"]
    assert unknown[0].get("type") == "unknown"


def test_every_format_says_where_a_report_comes_from() -> None:
    document = document_of(*ALL)
    document["made"] = {
        "date": "2026-01-31T12:00:00+01:00", "command": "distcheck verify --strategy 'a|b.py:f'",
        "commit": "0123456789abcdef0123456789abcdef01234567", "clean": False,
    }  # fmt: skip
    root = ElementTree.fromstring(junit.render(document).encode())
    for suite in root.iter("testsuite"):
        assert suite.get("timestamp") == "2026-01-31T12:00:00"
        said = {p.get("name"): p.get("value") for p in suite[0].iter("property")}
        assert said == {**document["made"], "clean": "false"}
    line = (
        "2026-01-31 12:00:00+01:00 · commit 0123456789ab with changes · "
        "distcheck verify --strategy 'a|b.py:f'"
    )
    assert describe_origin(decode_document(document).made) == line
    assert github.step_summary(document).endswith(line.replace("|", "\\|") + "\n")
    document["made"] |= {"clean": True, "command": ""}
    assert (
        describe_origin(decode_document(document).made)
        == "2026-01-31 12:00:00+01:00 · commit 0123456789ab"
    )
    del document["made"]
    assert describe_origin(decode_document(document).made) == "", "of an earlier version"
    assert "properties" not in junit.render(document)


def test_junit_shows_what_was_left_out_as_skipped() -> None:
    out = case_report("ddp", "pass", name="ddp-w2-exact")
    document = document_of(PASSED, plan=(PASSED, out), left_out={"ddp-w2-exact": "no float16"})
    root = ElementTree.fromstring(junit.render(document).encode())
    assert root.get("skipped") == "1"
    assert [s.get("message") for s in root.iter("skipped")] == ["no float16"]


ANY_TEXT = st.text(st.characters(codec=None), max_size=40)


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_any_bytes_make_valid_formats(strategy: str, detail: str, reason: str) -> None:
    cases = [
        case_report(strategy, "fail", outcome="raised", detail=detail, reason=reason, file=reason),
        case_report(strategy, "unknown", reason=reason, name="other"),
    ]
    document = as_document(Report(environment={}, cases=tuple(cases)))
    root = ElementTree.fromstring(junit.render(document).encode())
    found = [(c.get("classname"), c.get("name")) for c in root.iter("testcase")]
    assert len(found) == len(set(found)) == 2, "alike but for their id, they have other names"
    for line in github.annotations(document, Path("/there")):
        assert re.fullmatch(r"::(error|warning) [^\r\n]*?::[^\r\n]*", line)
    assert github.step_summary(document).startswith("## distcheck: ")


def test_annotations_are_at_the_file_and_line_of_the_strategy(tmp_path: Path) -> None:
    (tmp_path / "sync.py").write_text("")
    odd = case_report("50%, a:b\nc", "fail", file=str(tmp_path / "sub" / "odd,name.py"))
    lines = github.annotations(document_of(*ALL, odd), tmp_path)
    found = [parsed(line) for line in lines]
    assert [name for name, _, _ in found] == ["error", "error", "error", "warning"]
    _, properties, data = found[0]
    assert properties == {
        "file": "sync.py", "line": "8",
        "title": "distcheck: fail (missing-division): sync.py:f, world 2, gloo, mlp float32",
    }  # fmt: skip
    cause, suggestion, first, replay = data.splitlines()
    assert first.startswith("first: gradients (rounding): step 2, fc.weight[0,3], rank 1")
    assert cause == "cause: missing-division: twice the mean"
    assert suggestion == "try: divide"
    assert replay.startswith("replay: distcheck verify --strategy sync.py:f --world 2 ")
    assert found[1][2].startswith("rank 1 raised\n")
    assert found[2][1]["file"] == "sub/odd,name.py"
    assert found[2][1]["title"].startswith(
        "distcheck: fail (missing-division): 50%, a:b\nc, world 2"
    )


def test_github_shows_ten_and_is_told_how_many_more() -> None:
    many = [case_report(f"s{n}", "fail") for n in range(14)]
    lines = github.annotations(document_of(*many), Path("/"))
    assert len(lines) == 10
    assert parsed(lines[-1])[2] == "5 more cases failed; the summary and the JSON list them"
    assert len(github.annotations(document_of(*many[:10]), Path("/"))) == 10


def test_the_summary_fits_and_breaks_out_of_nothing() -> None:
    odd = case_report("a|b`<x>", "fail", outcome="raised", detail="```\n# no heading\n````\n<b>")
    text = github.step_summary(document_of(odd, *ALL))
    assert text.startswith("## distcheck: ❌ fail\n\n1 passed, 1 unknown, 3 failed\n")
    row = next(line for line in text.splitlines() if line.startswith("| ") and "&lt;x&gt;" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 5
    assert "\n`````text\n" in text
    assert "| missing-division: twice the mean |" in text, "the table leads with the cause"
    _, _, details = text.partition("### fail: sync")
    assert details.index("**cause**") < details.index("**try**") < details.index("**first**")
    assert text.index("sync.py:f") < text.index("| ddp |"), "what failed comes first"
    many = [case_report(f"s{n}", "fail", outcome="raised", detail="é" * 5000) for n in range(200)]
    document = document_of(*many)
    whole = github.step_summary(document)
    assert 900_000 < len(whole.encode()) <= github.MOST_SUMMARY_BYTES
    assert whole.endswith("do not fit here; the JSON report has all of them.\n")
    for room in (0, 10, 300, 5000):
        assert len(github.step_summary(document, room_bytes=room).encode()) <= room


def test_github_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError), errors_annotated({"github": ""}):
        raise UsageError("unknown strategy\nx")
    assert capsys.readouterr().out == "::error title=distcheck::unknown strategy%0Ax\n"
    with pytest.raises(UsageError), errors_annotated({}):
        raise UsageError("x")
    assert capsys.readouterr().out == ""
    with pytest.raises(CannotRunError, match="GITHUB_STEP_SUMMARY /proc/x cannot be written"):
        check_outputs({"github": "/proc/x"})
