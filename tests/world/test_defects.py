"""Defects of distcheck itself: exit code 70 and a saved traceback, and never a usage error."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from distcheck.compare.records import COMPARE
from distcheck.errors import ExitCode, InternalError, UsageError, defects
from distcheck.errors.defects import innermost_own_place, is_defect, save_traceback
from distcheck.judge import checks, job
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.merging import merge_results
from distcheck.judge.jobs import JUDGE, OBSERVE
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import IN_FLOAT64
from distcheck.reports.documents import check_document
from distcheck.reports.findings import failure_summary
from distcheck.reports.json_report import decode_document
from distcheck.training.jobs import INSPECT
from distcheck.verification.followups import leave_out_cases
from distcheck.workloads.datasets import PREPARE
from distcheck.worlds.jobs import Descriptors, Job
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool
from tests.additions.test_additions import copied
from tests.documents import document, passing

PACKAGE = Path(job.__file__).parents[1]
OWN = f'Traceback (most recent call last):\n  File "{PACKAGE}/judge/job.py", line 61, in judge\n'


@pytest.mark.parametrize("job", [INSPECT, JUDGE, OBSERVE, PREPARE, COMPARE])
def test_a_job_that_fails_in_distcheck_itself(pool: Pool, job: Job[Any, Any]) -> None:
    with pytest.raises(InternalError, match=r"\(at distcheck/\w+/.*\.py:\d+ in \w+\)") as caught:
        run_job(pool, Job(job.target, bytes, bytes), b"\xc1 is no message")
    assert 'File "' in caught.value.traceback
    assert caught.value.exit_code == ExitCode.INTERNAL == 70


def test_a_job_that_fails_in_the_code_of_others(pool: Pool) -> None:
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        run_job(pool, Job(f"{__name__}:divides", bytes, bytes), b"")


def divides(payload: bytes, fds: Descriptors, reporter: object) -> bytes:
    return bytes(1 // len(payload))


@pytest.mark.parametrize(
    ("kind", "more", "defect"),
    [
        ("KeyError", "", True),
        ("KeyError", f'  File "{Path(__file__)}", line 3, in sync\n', False),
        ("KeyError", '  File "elsewhere/train.py", line 3, in sync\n', False),
        ("RuntimeError", f'  File "{Path(subprocess.__file__)}", line 3, in run\n', True),
        ("OSError", "", False),
        ("FileNotFoundError", "", False),
        ("MemoryError", "", False),
        ("OutOfMemoryError", "", False),
    ],
)
def test_whose_it_is(kind: str, more: str, defect: bool) -> None:
    assert is_defect(kind, f"{OWN}    x\n{more}{kind}: 'x'\n") == defect
    assert innermost_own_place(OWN + more) == "distcheck/judge/job.py:61 in judge"


def test_no_frame_at_all_is_nobodys() -> None:
    assert not is_defect("KeyError", "KeyError: 'x'\n")


def test_the_command_says_where_and_keeps_the_traceback(tmp_path: Path) -> None:
    program = (
        "import sys; from distcheck.cli import main\n"
        "from distcheck.cli.commands import list as catalog\n"
        "catalog.loading = None\n"
        "sys.argv = ['distcheck', 'list']; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 70, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("distcheck: internal error: AttributeError: ")
    assert "(at distcheck/cli/commands/list.py:" in line
    (saved,) = (tmp_path / ".distcheck" / "defects").iterdir()
    assert str(saved.relative_to(tmp_path)) in line
    assert "Traceback (most recent call last)" in saved.read_text()


def test_a_traceback_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVICE_TOKEN", "hunter2-hunter2")
    assert "hunter2" not in Path(save_traceback("ValueError: hunter2-hunter2")).read_text()
    cut = "hunter2-hunter2" + "x" * (defects._MOST_CHARACTERS - 9)  # begins within the secret
    assert "hunter2" not in Path(save_traceback(cut)).read_text()


def test_a_crashing_check_is_unknown_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call with arguments that the function does not take fails in judge/job.py."""
    broken = SimpleNamespace(compare=lambda: None, OVER_STEPS=True)
    monkeypatch.setattr(checks, "load_check", lambda name: broken)
    monkeypatch.setattr(job, "References", lambda *given: None)
    seen = Evidence(case=None, facts=None, trace=None)  # type: ignore[arg-type]
    monkeypatch.setattr(job, "evidence_of", lambda *given: seen)
    planned = SimpleNamespace(check="loss", layer="bitwise")
    asked = SimpleNamespace(steps=(), planned=(planned,), of_run=(), contract=None)
    (result,) = job.judge_trace(asked, None, None, None)  # type: ignore[arg-type]
    assert (result.verdict, "judge/job.py" in result.defect) == ("unknown", True)
    assert result.reason.startswith("the check itself raised an error: TypeError")


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
    with pytest.raises(UsageError, match="has the exit code 5, but its cases give 70"):
        check_document({**found, "exit_code": 5}, "r.json")


def test_a_defect_in_a_rank_is_no_failure_of_the_case() -> None:
    whole = passing(world=2)
    broken = msgspec.structs.replace(
        whole.checks[0], verdict="unknown", defect=OWN, reason="internal error in rank 0"
    )
    ends = (Outcome(rank=0, outcome=RankEnd.RAISED), Outcome(rank=1, outcome=RankEnd.ENDED))
    rest = [msgspec.structs.replace(one, verdict="unknown") for one in whole.checks[1:]]
    case = msgspec.structs.replace(whole, verdict="unknown", checks=(broken, *rest), outcomes=ends)
    assert (case.ranks_failed, case.ranks_finished) == (False, False)
    found = document(case)
    assert (found["verdict"], found["exit_code"]) == ("unknown", 70)
    check_document(found, "r.json")
    assert not decode_document(found).cases[0].ranks_failed
    assert (
        failure_summary(decode_document(found).cases[0]).headline
        == "outcome: internal error in rank 0"
    )
    companion = msgspec.structs.replace(
        case, case=msgspec.structs.replace(case.case, dtype="float64", layers=(IN_FLOAT64,))
    )
    of_float32 = msgspec.structs.replace(
        whole, case=msgspec.structs.replace(whole.case, id="other", dtype="float32")
    )
    kept, out = leave_out_cases([of_float32, companion])
    assert (len(kept), out) == (2, {}), "it does not say that the code computes in float32 alone"


PLANTED = '''
import distcheck
from distcheck.records import Report

USER = """
def sync(model, step):
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= step.world_size
from torch import distributed
"""
open("mine.py", "w").write(USER)
quick = dict(world=2, workload="mlp", dtype="float32", steps=1, separate=False)
for case in distcheck.verify(["allreduce", "mine.py:sync"], **quick).cases:
    outcome = case.checks[0]
    print([outcome.verdict, "planted" in outcome.defect, [d.cause for d in case.diagnosis],
           int(Report(environment={}, cases=(case,)).exit_code)])
    print(outcome.reason if outcome.defect else case.outcomes[0].detail)
'''


def test_a_defect_that_is_planted_in_a_rank(tmp_path: Path) -> None:
    """With built-in code alone it is one; beside code of another's it is not known whose it is."""
    copied(copy := tmp_path / "copy")
    recorder = copy / "distcheck" / "training" / "recorder.py"
    before, where, after = recorder.read_text().partition("model_layout = self._layout.model\n")
    assert where
    recorder.write_text(f"{before}model_layout = {{}}['planted']\n{after}")
    ran = subprocess.run(
        [sys.executable, "-c", PLANTED], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    ours, reason, theirs, *detail = ran.stdout.splitlines()
    assert ours == "['unknown', True, [], 70]", ran.stderr
    assert reason.startswith("internal error in rank ")
    assert "KeyError: 'planted' (at distcheck/training/recorder.py:" in reason
    assert theirs == "['fail', False, ['crash'], 4]"
    assert any(line.startswith("raised in distcheck/training/recorder.py:") for line in detail)
