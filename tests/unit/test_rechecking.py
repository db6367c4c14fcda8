"""What a recheck must not take for green: cases that failed and whose traces are gone."""

import json
from pathlib import Path

import msgspec
import pytest

from distcheck.errors import UsageError
from distcheck.plan.cases import plan_cases
from distcheck.plan.settings import Request
from distcheck.verification.rechecking import failed_without_trace
from tests.unit.gate_documents import FAILED, PASSED, document_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run of two cases, one of which failed; its traces are not there."""
    monkeypatch.chdir(tmp_path)
    Path("sync.py").write_text("def f(model): ...\n")
    case = plan_cases(Request(strategies=("sync.py:f",), worlds=(2,), workloads=("mlp",)))[0]
    saved = msgspec.structs.replace(case, id=FAILED.case.id.replace("sync.py:f", "f"))
    failed = msgspec.structs.replace(FAILED, case=msgspec.structs.replace(FAILED.case, id=saved.id))
    (tmp_path / "report.json").write_text(json.dumps(document_of(PASSED, failed)))
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / f"{saved.id}.json").write_bytes(msgspec.json.encode(saved))
    return tmp_path


def test_a_failed_case_without_its_trace_is_missed(folder: Path) -> None:
    (lost,) = failed_without_trace(folder, {PASSED.case.id})
    assert lost.strategy == "sync.py:f"
    assert failed_without_trace(folder, {PASSED.case.id, lost.id}) == []


def test_nor_is_it_forgotten_without_its_file(folder: Path) -> None:
    (file,) = (folder / "cases").iterdir()
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        failed_without_trace(folder, {PASSED.case.id})


def test_a_folder_without_a_report_has_its_traces_alone(folder: Path) -> None:
    (folder / "report.json").unlink()
    assert failed_without_trace(folder, ()) == []
