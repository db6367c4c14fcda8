"""A verification that ends early still says what it knows: exit code, JSON, and which rank."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from distcheck import interrupts
from distcheck.errors import HelperError
from distcheck.worlds.helper_process import ForkedHelper
from distcheck.worlds.launch import run_until_over, start_job
from distcheck.worlds.pool import Pool
from tests.world import warm
from tests.world.command import COMMAND, QUICK, hear_interrupts

ENDS = """
import os, signal, time
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

def sleeps(model, step):
    if _at(step):
        open("asleep", "w").close()
        time.sleep(1000)
    good(model)
"""


def verify(folder: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A verification of one of them, which writes r.json."""
    (folder / "ends.py").write_text(ENDS)
    words = ("verify", "--strategy", f"ends.py:{name}", *QUICK, "--no-separate", *more)
    return warm.run(*words, "--json", "r.json", cwd=folder)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("kills_the_helper", "ended unexpectedly"),
        ("stops_the_helper", r"does not answer: it was stopped \(process \d+, state T\)"),
    ],
)
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


def test_a_helper_that_is_stopped_before_ranks_exist_is_noticed() -> None:
    pool = Pool(ForkedHelper())
    pool.wait_ready()
    job = start_job(pool, target="tests.world.jobs:sleeps_alone", payload=b"", fds=[], deadline_s=9)
    helper = psutil.Process(pool._helper.pid)
    helper.suspend()
    with pytest.raises(HelperError, match="state T"):
        run_until_over(pool, job)
    assert not pool.usable
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
    pool.close()


def test_a_pause_of_everything_is_no_stopped_helper() -> None:
    """A suspended machine or job: the front did not look either."""
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
    ],
)
def test_signals_end_a_verification_with_its_report(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
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
    assert err.strip() == "distcheck: interrupted after 0 of 1 cases; nothing is left running"
    assert "UNKNOWN ends.py:sleeps" in out
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["verdict"], document["exit_code"]) == ("unknown", 130)
    assert not [process for process in family if process.is_running()]


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
