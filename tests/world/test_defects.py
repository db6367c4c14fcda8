"""Defects of distcheck itself: exit code 70 and a saved traceback, and never a usage error."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from distcheck.compare.records import COMPARE
from distcheck.errors import ExitCode, InternalError, UsageError
from distcheck.errors.defects import is_defect, place_of, save_traceback
from distcheck.judge import checks, job
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.merging import merge_results
from distcheck.reports.documents import check_document
from distcheck.training.jobs import INSPECT, JUDGE, OBSERVE
from distcheck.workloads.datasets.job import PREPARE
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool
from tests.documents import document, passing

PACKAGE = Path(job.__file__).parents[1]
OWN = f'Traceback (most recent call last):\n  File "{PACKAGE}/judge/job.py", line 61, in judge\n'


@pytest.mark.parametrize("target", [INSPECT, JUDGE, OBSERVE, PREPARE, COMPARE])
def test_a_job_that_fails_in_distcheck_itself(pool: Pool, target: str) -> None:
    with pytest.raises(InternalError, match=r"\(at distcheck/\w+/.*\.py:\d+ in \w+\)") as caught:
        run_job(pool, target, b"\xc1 is no message", [])
    assert 'File "' in caught.value.traceback
    assert caught.value.exit_code == ExitCode.INTERNAL == 70


def test_a_job_that_fails_in_the_code_of_others(pool: Pool) -> None:
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        run_job(pool, f"{__name__}:divides", b"", [])


def divides(payload: bytes, fds: list[int], reporter: object) -> bytes:
    return bytes(1 // len(payload))


@pytest.mark.parametrize(
    ("kind", "more", "defect"),
    [
        ("KeyError", "", True),
        ("KeyError", f'  File "{Path(__file__)}", line 3, in sync\n', False),
        ("KeyError", '  File "/home/me/train.py", line 3, in sync\n', False),
        ("RuntimeError", f'  File "{Path(subprocess.__file__)}", line 3, in run\n', True),
        ("OSError", "", False),
        ("FileNotFoundError", "", False),
        ("MemoryError", "", False),
        ("OutOfMemoryError", "", False),
    ],
)
def test_whose_it_is(kind: str, more: str, defect: bool) -> None:
    assert is_defect(kind, f"{OWN}    x\n{more}{kind}: 'x'\n") == defect
    assert place_of(OWN + more) == "distcheck/judge/job.py:61 in judge"


def test_no_frame_at_all_is_nobodys() -> None:
    assert not is_defect("KeyError", "KeyError: 'x'\n")


def test_the_command_says_where_and_keeps_the_traceback(tmp_path: Path) -> None:
    program = (
        "import sys; from distcheck.cli import catalogue, main\n"
        "catalogue.loading = None\n"
        "sys.argv = ['distcheck', 'list']; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 70, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("distcheck: internal error: AttributeError: ")
    assert "(at distcheck/cli/catalogue.py:" in line
    (saved,) = (tmp_path / ".distcheck" / "defects").iterdir()
    assert str(saved.relative_to(tmp_path)) in line
    assert "Traceback (most recent call last)" in saved.read_text()


def test_a_traceback_is_kept_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVICE_TOKEN", "hunter2-hunter2")
    assert "hunter2" not in Path(save_traceback("ValueError: hunter2-hunter2")).read_text()


def test_a_check_that_fails_in_distcheck_itself_is_unknown_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call with arguments that the function does not take fails in judge/job.py."""
    broken = SimpleNamespace(compare=lambda: None, OVER_STEPS=True)
    monkeypatch.setattr(checks, "load", lambda name: broken)
    monkeypatch.setattr(job, "References", lambda *given: None)
    seen = Evidence(case=None, contract=None, trace=None)  # type: ignore[arg-type]
    monkeypatch.setattr(job, "evidence_of", lambda *given: seen)
    asked = SimpleNamespace(steps=(), planned=(("loss", "X"),), contract=None)
    (result,) = job.judge_trace(asked, None, None, None)  # type: ignore[arg-type]
    assert (result.verdict, "judge/job.py" in result.defect) == ("unknown", True)
    assert result.reason.startswith("the check itself failed: TypeError")


def test_a_report_with_such_a_check_has_that_exit_code_and_no_other() -> None:
    whole = passing()
    broken = msgspec.structs.replace(whole.checks[1], verdict="unknown", defect=OWN)
    broken = merge_results([whole.checks[1], broken])
    case = msgspec.structs.replace(
        whole, verdict="unknown", checks=(whole.checks[0], broken, *whole.checks[2:])
    )
    found = document(case)
    assert (found["verdict"], found["exit_code"]) == ("unknown", 70)
    assert found["cases"][0]["checks"][1]["defect"] == OWN
    check_document(found, "r.json")
    with pytest.raises(UsageError, match="its exit code is 5, and its cases give 70"):
        check_document({**found, "exit_code": 5}, "r.json")
