"""The command line when things end early: Ctrl-C, a full disk, lost and edited files."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until
from tests.world import warm
from tests.world.command import (
    BAD,
    COMMAND,
    FILLER,
    QUICK,
    SURE,
    Run,
    complaints,
    distcheck,
    hear_interrupts,
)  # fmt: skip

__all__ = ["distcheck"]


@pytest.mark.parametrize("after_s", [0.5, pytest.param(1.0, marks=pytest.mark.sweep), 2.0])
def test_ctrl_c_before_any_case(tmp_path: Path, after_s: float) -> None:
    """While torch is imported, while strategies are looked at, while orders are calibrated."""
    front = subprocess.Popen(
        [*COMMAND, "verify", "--strategy", "ddp", "--workload", "vgg11"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear_interrupts,
    )  # fmt: skip
    while not psutil.Process(front.pid).children():  # it hears the signal by then
        time.sleep(0.01)
    time.sleep(after_s - 0.4)
    front.send_signal(signal.SIGINT)
    _, err = front.communicate(timeout=30)
    assert front.returncode == 130, err
    assert err.strip().endswith("nothing is left running")
    assert "Traceback" not in err


@pytest.mark.sweep
def test_own_records_come_and_go_without_harm(distcheck: Run, tmp_path: Path) -> None:
    """Neither many other runs nor a lost folder change a verdict."""
    for number in range(12):
        (tmp_path / ".distcheck" / "runs" / f"9999-{number:02}-1").mkdir(parents=True)
    ran = distcheck("verify", "--strategy", "bad.py:loses_its_folder", *QUICK)
    assert (ran.returncode, complaints(ran.stderr)) == (0, [])


@pytest.mark.sweep
def test_a_folder_that_was_there_stays(distcheck: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert distcheck("verify", "--strategy", "bad.py:nothing", "--save", "mine").returncode == 2
    assert (tmp_path / "mine").is_dir()
    assert distcheck("verify", "--strategy", "bad.py:nothing", "--json", "r.json").returncode == 2
    assert not (tmp_path / "r.json").exists()


def test_an_edited_case_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    ran = warm.run("verify", "--strategy", "bad.py:no_sync", *SURE, cwd=tmp_path)
    assert ran.returncode == 1
    (case,) = tmp_path.glob(".distcheck/runs/*/cases/*.json")
    document = json.loads(case.read_text())
    case.write_text(json.dumps({**document, "layers": []}))
    again = warm.run("replay", str(case), cwd=tmp_path)
    assert again.returncode == 2
    said = "is not a case that can run: comparisons [] do not match mlp:small in float32"
    assert said in again.stderr


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("separate", "children"),
    [("--no-separate", 3), pytest.param("--separate", 5, marks=pytest.mark.sweep)],
)
def test_ctrl_c_reports_and_cleans_up(tmp_path: Path, separate: str, children: int) -> None:
    """The helper, two ranks and, for a rerun in them, two further interpreters. Such a rerun may
    come after the other case's first world, which hangs here.
    """
    (tmp_path / "bad.py").write_text(BAD)
    command = [*COMMAND, "verify", "--strategy", "ddp"]
    command += ["--strategy", "bad.py:hang", *QUICK, separate, "--json", "report.json"]
    front = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear_interrupts,
    )  # fmt: skip
    wait_until((tmp_path / "asleep").exists)
    without_judge = 0  # the first case is judged while the second runs
    while without_judge < 10:
        time.sleep(0.1)
        family = psutil.Process(front.pid).children(recursive=True)
        without_judge = without_judge + 1 if len(family) == children else 0
    front.send_signal(signal.SIGINT)
    out, err = front.communicate(timeout=60)
    assert front.returncode == 130
    judged = int("PASS    ddp" in out)
    assert judged or separate == "--separate"
    said = f"distcheck: interrupted after {judged} of 2 cases; nothing is left running"
    assert complaints(err) == [said]
    assert f"UNKNOWN interrupted: {2 - judged} of 2 cases were not judged: " in out
    assert "bad.py:hang, world 2" in out
    if not judged:
        assert len(out.splitlines()) <= 5, "what nothing is known of is one line"
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["exit_code"] == 130
    verdicts = ["pass" if judged else "unknown", "unknown"]
    assert [c["verdict"] for c in document["cases"]] == verdicts
    assert not [process for process in family if _is_there(process)]


def on_a_small_disk(tmp_path: Path, megabytes: int, then: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script in a namespace where ./small is a file system of so many megabytes."""
    small = tmp_path / "small"
    small.mkdir()
    script = f"mount -t tmpfs -o size={megabytes}m none {small} && cd {tmp_path} && {then}"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    except FileNotFoundError:
        pytest.skip("no unshare here, so no file system of its own")
    if re.search("^(unshare|mount):", ran.stderr, re.M):
        pytest.skip(f"no file system of its own can be mounted here: {ran.stderr.strip()}")
    return ran


def save_to_small(strategy: str) -> str:
    return (
        f"{sys.executable} -m distcheck verify --strategy {strategy} --workload mlp "
        "--dtype float32 --world 2 --no-separate --save small/run"
    )


@pytest.mark.sweep
def test_a_disk_that_is_too_small_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ran = on_a_small_disk(tmp_path, 3, save_to_small("ddp"))
    assert ran.returncode == 3
    assert re.search(r"small/run needs about \d+ MiB; \d+ MiB are free", ran.stderr)
    assert ran.stdout == ""


def test_a_full_disk_does_not_change_a_failure(tmp_path: Path) -> None:
    """Neither the run nor the JSON can be written, and exit code 1 stays."""
    (tmp_path / "filler.py").write_text(FILLER.replace("p.grad /=", "p.grad *="))
    then = save_to_small("filler.py:fills_the_disk") + " --json small/r.json"
    ran = on_a_small_disk(tmp_path, 200, then)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "FAIL    filler.py:fills_the_disk   2 ranks" in ran.stdout
    assert "could not be saved to small/run (No space left on device)" in ran.stderr
    warning = "warning: --json small/r.json cannot be written: No space left on device"
    assert warning in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.sweep
def test_a_disk_that_fills_up_meanwhile_loses_no_verdict(tmp_path: Path) -> None:
    """The strategy itself fills the disk, at its last step."""
    (tmp_path / "filler.py").write_text(FILLER)
    then = save_to_small("filler.py:fills_the_disk") + "; code=$?; ls small/run/traces; exit $code"
    ran = on_a_small_disk(tmp_path, 200, then)
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "PASS    filler.py:fills_the_disk   2 ranks" in ran.stdout
    assert "could not be saved to small/run (No space left on device)" in ran.stderr
    assert "the verdict above is unaffected" in ran.stderr
    assert not re.search("^filler-", ran.stdout, re.M), "no half of a trace is left"


@pytest.mark.parametrize(
    ("strategy", "behind", "code"),
    [
        ("no_sync", ">&-", 1),
        *(
            pytest.param(*row, marks=pytest.mark.sweep)
            for row in (("good", "| head -1", 0), ("no_sync", "| true", 1), ("good", ">&-", 0))
        ),
    ],
)
def test_closed_pipes_keep_a_verdict(strategy: str, behind: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    words = f"verify --strategy bad.py:{strategy} {' '.join(QUICK)} {behind}"
    ran = subprocess.run(
        ["bash", "-c", f"{' '.join(COMMAND)} {words}; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    assert complaints(ran.stderr) == []
