"""A verification that ends early still says what it knows: exit code, JSON, and which rank."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

import distcheck
from distcheck.errors import HelperError
from distcheck.records import Outcome
from distcheck.verification.report_builder import Interrupted
from distcheck.verification.session import Session
from distcheck.worlds import interrupts, world
from distcheck.worlds.launch import run_until_over, start_job
from distcheck.worlds.local import forking
from distcheck.worlds.local.helper_process import ForkedHelper
from distcheck.worlds.pool import Pool
from tests.world import warm
from tests.world.command import COMMAND, QUICK, complaints, hear_interrupts
from tests.world.launching import lone

ENDS = """
import os, shutil, signal, subprocess, time
import torch.distributed as dist

def good(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

def _at(step):
    return step.rank == 1 and step.index == 1

def kills_the_helper(model, step):
    if _at(step):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    good(model)

def stops_the_helper(model, step):
    if _at(step):
        os.kill(os.getppid(), signal.SIGSTOP)
    good(model)

def stops_itself(model, step):
    if _at(step):
        os.kill(os.getpid(), signal.SIGSTOP)
    good(model)

def is_stopped_for_a_while(model, step):
    if _at(step):
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    good(model)

def removes_the_folder(model, step):
    good(model)
    if _at(step):
        shutil.rmtree(os.getcwd())

def renames_the_folder(model, step):
    good(model)
    if _at(step):
        os.rename(os.getcwd(), os.getcwd() + ".other")

def shortens_the_trace(model, step):
    good(model)
    for fd in range(3, 64) if _at(step) else ():
        if os.path.realpath(f"/proc/self/fd/{fd}").startswith("/memfd:distcheck-trace"):
            os.ftruncate(fd, 0)

def removes_it_by_a_command(model, step):
    good(model)
    if _at(step):
        subprocess.run(["rm", "-rf", os.getcwd()])

def _pipes():
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                yield fd
        except OSError:
            pass

def writes_garbage(model, step):
    good(model)
    for fd in _pipes() if _at(step) else ():
        try:
            os.write(fd, b"\\x05\\0\\0\\0garbage")
        except OSError:
            pass

def writes_text(model, step):
    good(model)
    for fd in _pipes() if _at(step) else ():
        try:
            os.write(fd, b"a line of another log")
        except OSError:
            pass

def sleeps(model, step):
    if _at(step):
        open("asleep", "w").close()
        time.sleep(1000)
    good(model)
"""


def verify(folder: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A verification of one of them, which writes r.json."""
    (folder / "ends.py").write_text(ENDS)
    words = ["verify", "--strategy", f"ends.py:{name}", *QUICK, "--no-separate", *more]
    words += ["--json", "r.json"]
    if not name.startswith("writes"):
        return warm.run(*words, cwd=folder)
    # A process that was forked has pipes of others as well.
    command = [*COMMAND, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("kills_the_helper", "ended unexpectedly"),
        pytest.param("stops_the_helper",
            r"does not answer: it was stopped \(process \d+, state T\)", marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_a_lost_helper_leaves_a_report(tmp_path: Path, name: str, how: str) -> None:
    ran = verify(tmp_path, name)
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    assert re.search(f"the process that forks the ranks {how}", ran.stderr)
    assert "0 of 1 cases were judged" in ran.stderr
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["verdict"], document["exit_code"]) == ("unknown", 3)
    assert any(re.search(how, note) for note in document["cases"][0]["notes"])
    (saved,) = tmp_path.glob(".distcheck/runs/*/report.json")
    assert json.loads(saved.read_text())["exit_code"] == 3


RANK_1_AT_IMPORT = """
import os
if os.environ.get("RANK") == "1":
    raise RuntimeError("not on this rank")
from ends import good
"""


def outcome_of(folder: Path, ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """How the rank ended that a failed run names first, by its JSON."""
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    document = json.loads((folder / "r.json").read_text())
    assert document["exit_code"] == 4
    first: dict[str, Any] = document["cases"][0]["outcomes"][0]
    return {**first, "cause": document["cases"][0]["diagnosis"][0]}


@pytest.mark.parametrize(
    ("name", "outcome", "said"),
    [
        ("removes_the_folder", "raised", "this is the working directory of the run"),
        ("renames_the_folder", "raised", "remove and rename only folders that your code created"),
        ("shortens_the_trace", "raised", "PermissionError: [Errno 1] Operation not permitted"),
        ("writes_garbage", "raised", "the code wrote to a descriptor that it had not opened"),
        pytest.param("writes_text", "raised", "did not write", marks=pytest.mark.sweep),
    ],
)
def test_harmful_ranks_are_named(tmp_path: Path, name: str, outcome: str, said: str) -> None:
    found = outcome_of(tmp_path, verify(tmp_path, name, "--deadline", "200"))
    assert (found["rank"], found["outcome"]) == (1, outcome)
    assert said in msgspec.convert(found, Outcome).detail


def in_process(folder: Path, name: str, **more: Any) -> distcheck.Report:
    (folder / "ends.py").write_text(ENDS)
    return distcheck.verify(
        f"{folder}/ends.py:{name}", world=2, workload="mlp:small", dtype="float32", separate=False,
        **more,
    )  # fmt: skip


def test_a_rank_stopped_for_long_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_STOPPED_S", 1.0)
    (case,) = in_process(tmp_path, "stops_itself", deadline_s=2).cases
    first, (cause, *_) = case.outcomes[0], case.diagnosis
    assert (first.rank, first.outcome) == (1, "hung")
    assert "stopped (state T, SIGSTOP)" in first.detail
    assert cause.cause == "hang"
    assert cause.evidence.startswith("rank 1 was stopped; rank 0 waited in all_reduce of")


def test_a_rank_that_is_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """As with a lid that is closed, or a person who looks: also where the deadline is shorter."""
    report = in_process(tmp_path, "is_stopped_for_a_while", deadline_s=1)
    assert report.verdict == "pass", report


def test_one_rank_that_cannot_import_has_failed(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "one.py").write_text(RANK_1_AT_IMPORT)
    words = ("verify", "--strategy", "one.py:good", *QUICK, "--no-separate", "--json", "r.json")
    found = outcome_of(tmp_path, warm.run(*words, cwd=tmp_path))
    assert (found["rank"], found["outcome"]) == (1, "raised")
    assert (
        "importing strategy one.py raised RuntimeError: not on this rank"
        in msgspec.convert(found, Outcome).detail
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("os._exit(0)", r"exited with code 0 at \S+/one.py:5; loading must return"),
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)",
            r"was stopped \(state T\), as SIGSTOP does; load", marks=pytest.mark.sweep),
        pytest.param("time.sleep(1000)", "hung: it made no progress for 30 s at .*/one.py:5",
            marks=pytest.mark.sweep),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV at .*/one.py:5",
            marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_code_that_ends_the_process_that_loads_it(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(f"import os\nimport signal\nimport time\n\n{line}\n")
    words = ("verify", "--strategy", "one.py:good", *QUICK, "--deadline", "2")
    ran = warm.run(*words, cwd=tmp_path)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert re.search(f"the process that loads one.py:good and mlp:small {said}", ran.stderr)


def test_a_folder_that_is_gone_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "ends.py").write_text(ENDS)
    words = ("verify", "--strategy", "ends.py:removes_it_by_a_command", *QUICK, "--no-separate")
    ran = warm.run(*words, "--json", str(tmp_path / "r.json"), cwd=folder)
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    assert "the working directory no longer exists: the code under test" in ran.stderr
    assert json.loads((tmp_path / "r.json").read_text())["exit_code"] == 4


def test_a_helper_stopped_before_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_STOPPED_S", 1.0)
    pool = Pool(ForkedHelper())
    pool.wait_ready()
    job = start_job(pool, lone("sleeps_alone"), b"", deadline_s=9)
    helper = psutil.Process(pool._helper.pid)
    helper.suspend()
    with pytest.raises(HelperError, match="state T"):
        run_until_over(pool, job)
    assert not pool.usable
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
    pool.close()


def test_a_pause_of_everything_is_no_stopped_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended machine or job: the front did not look either."""
    monkeypatch.setattr(forking, "_STOPPED_S", 2.0)
    pool = Pool(ForkedHelper())
    pool.wait_ready()
    pool.pump(0)
    os.kill(pool._helper.pid, signal.SIGSTOP)
    time.sleep(2.5)
    pool.pump(0)
    os.kill(pool._helper.pid, signal.SIGCONT)
    pool.pump(0.3)
    assert pool.usable
    pool.close()


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGTERM], id="SIGTERM"),
        pytest.param([signal.SIGINT, signal.SIGINT], id="twice"),
        pytest.param([signal.SIGTERM, signal.SIGINT], id="both", marks=pytest.mark.sweep),
        pytest.param([signal.SIGHUP], id="SIGHUP", marks=pytest.mark.sweep),
        pytest.param([signal.SIGQUIT], id="SIGQUIT", marks=pytest.mark.sweep),
    ],
)
def test_signals_still_give_a_report(tmp_path: Path, signals: list[signal.Signals]) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    words = ["verify", "--strategy", "ends.py:sleeps", *QUICK, "--no-separate", "--json", "r.json"]
    front = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=hear_interrupts,
    )  # fmt: skip
    while not (tmp_path / "asleep").exists():
        assert front.poll() is None
        time.sleep(0.05)
    family = psutil.Process(front.pid).children(recursive=True)
    for number in signals:
        front.send_signal(number)
        time.sleep(0.05)
    out, err = front.communicate(timeout=60)
    assert front.returncode == 130, err
    (said,) = complaints(err)
    assert said == "distcheck: interrupted after 0 of 1 cases; nothing is left running"
    assert "were not judged: ends.py:sleeps" in out
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["verdict"], document["exit_code"]) == ("unknown", 130)
    assert not [process for process in family if process.is_running()]


def test_a_signal_that_the_parent_had_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nohup does with SIGHUP."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_IGN}
    heard: dict[int, object] = {}
    monkeypatch.setattr(signal, "getsignal", lambda number: usual.get(number, signal.SIG_DFL))
    monkeypatch.setattr(signal, "signal", heard.__setitem__)
    interrupts.handle_signals()
    assert heard == dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGQUIT), interrupts._hear)


def test_the_third_signal_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(interrupts, "_heard", 0)
    monkeypatch.setattr(os, "_exit", left.append)
    with pytest.raises(KeyboardInterrupt):
        interrupts._hear(signal.SIGINT, None)
    interrupts._hear(signal.SIGTERM, None)
    assert left == []
    interrupts._hear(signal.SIGINT, None)
    assert left == [130]


def test_an_interrupted_search_has_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks have failed when Ctrl-C comes, and the closer look has not begun."""

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "_look_closer", interrupted)
    with pytest.raises(Interrupted) as caught:
        distcheck.verify("tests.mutants.scale:missing_division", world=2, workload="mlp")
    found = [one for case in caught.value.report.cases for one in case.diagnosis]
    assert {one.cause for one in found} == {"unexplained"}
    assert "not possible: the run was interrupted before this case" in found[0].evidence


def test_a_stopped_judge_gets_as_long_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be silent for minutes, but not stopped."""
    monkeypatch.setattr(world, "_STOPPED_S", 1.0)
    stopped: Any = SimpleNamespace(done=None, is_stopped=True)
    judge, ranks = (world.World([], deadline_s=600.0, stopped_s=s) for s in (2.0, None))
    judge.children = ranks.children = [stopped]
    assert [judge._has_hung(elapsed) for elapsed in (0.0, 1.9, 0.2)] == [False, False, True]
    assert not ranks._has_hung(599.0)
