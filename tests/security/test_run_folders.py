"""Run folders from elsewhere: what `open`, `runs` and `bundle` do with links and odd names."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from distcheck.cli import root_command
from distcheck.errors import UsageError
from distcheck.reports import github
from distcheck.reports.json_report import render
from distcheck.store.bundle import make_bundle
from tests.security import zips
from tests.unit.gate_documents import FAILED, PASSED, document_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    folder = tmp_path / ".distcheck/runs/20260101-000000-1"
    (folder / "cases").mkdir(parents=True)
    (folder / "cases/case-w2.json").write_text(json.dumps({**zips.CASE, "strategy": "ddp"}))
    (folder / "report.json").write_text(render(document_of(PASSED)))
    (tmp_path / "secret").write_text("precious")
    return folder


def test_a_page_that_is_a_link_is_not_written_to(run: Path) -> None:
    (run / "report.html").symlink_to("../../../secret")
    with pytest.raises(UsageError, match=r"report.html is a link or a special file"):
        root_command.main(["open", str(run)], standalone_mode=False)
    assert Path("secret").read_text() == "precious"
    (run / "report.html").unlink()
    assert root_command.main(["open", str(run)], standalone_mode=False) == 0
    assert "<!doctype html>" in (run / "report.html").read_text()


def test_run_names_stay_on_their_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = document_of(PASSED)
    odd = "distcheck \x1b]0;title\x07\n::error::x\u202e"
    document["made"] = {"date": "", "command": odd, "commit": "", "clean": None}
    (run / "report.json").write_text(render(document))
    (run.parent / "20270101-\x1b[31m\n::error::y" / "cases").mkdir(parents=True)
    assert root_command.main(["runs"], standalone_mode=False) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 3
    assert all(line.isprintable() for line in said.splitlines())
    assert "\n::" not in said


def test_a_link_in_a_trace_is_not_packed(run: Path, tmp_path: Path) -> None:
    (run / "traces/case-w2/run-1").mkdir(parents=True)
    (run / "traces/case-w2/run-1/index.bin").write_bytes(b"x")
    make_bundle(run, tmp_path / "a.zip", traces=True)
    (run / "traces/case-w2/run-1/more").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="more is a link or a special file"):
        make_bundle(run, tmp_path / "b.zip", traces=True)
    assert not (tmp_path / "b.zip").exists()


@pytest.mark.parametrize("name", ["secret", "secret.py"])
def test_a_file_that_a_report_names_is_not_packed(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    document: dict[str, Any] = document_of(PASSED)
    document["cases"][0] |= {"strategy": "ddp", "strategy_file": str(tmp_path / name)}
    (run / "report.json").write_text(render(document))
    make_bundle(run, tmp_path / "a.zip", traces=False)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert not any(b"precious" in archive.read(member) for member in archive.namelist())


def test_a_place_that_no_file_can_have_is_shown_as_it_is(tmp_path: Path) -> None:
    document = document_of(FAILED)
    for file in ("/" + "a" * 5000 + "/x.py", "/a" * 20_000, "/a\0b/x.py"):
        document["cases"][0]["strategy_file"] = file
        (line,) = github.annotations(document, tmp_path)
        assert line.startswith("::error file=/a")
