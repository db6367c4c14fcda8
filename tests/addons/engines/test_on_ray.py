"""`--on ray` on a Ray that is started on this machine: `tox -e engines`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.world.command import COMMAND, QUICK, Run
from tests.world.command import distcheck as distcheck

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'distcheck[ray]'")
pytestmark = pytest.mark.sweep

SLOW = """
import os, pathlib, time
import torch.distributed as dist

def sync(model, step):
    if step.world_size == 3:
        pathlib.Path(NOTES, f"{os.getpid()}").touch()
        time.sleep(1000)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
"""


# A Ray that is reached by loopback alone, whose tasks are not run again.
ALONE = {"RAY_AUTH_MODE": "disabled", "RAY_TASK_MAX_RETRIES": "0"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A Ray of two CPUs in processes of its own; yields its address."""
    words = [sys.executable, "-m", "ray.scripts.scripts"]
    subprocess.run(
        [*words, "start", "--head", "--num-cpus=2", "--port=6399", "--include-dashboard=false",
         "--node-ip-address=127.0.0.1"],
        check=True, env={**os.environ, **ALONE}, capture_output=True, timeout=200,
    )  # fmt: skip
    yield "127.0.0.1:6399"
    subprocess.run([*words, "stop", "--force"], check=True, capture_output=True, timeout=200)


def test_parts_are_judged_in_a_copied_folder(distcheck: Run, tmp_path: Path, cluster: str) -> None:
    words = ("verify", "--strategy", "bad.py:good", "--strategy", "bad.py:no_sync", *QUICK)
    ran = distcheck(
        *words, "--on", "ray", "--json", "whole.json", env={"RAY_ADDRESS": cluster, **ALONE}
    )
    assert ran.returncode == 1, ran.stderr
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [case["verdict"] for case in whole["cases"]] == ["pass", "fail"]
    assert "code: a copy of this folder is sent to each worker" in ran.stderr


@pytest.mark.parametrize("what", ["worker", "node"])
def test_a_task_that_is_lost_is_unknown(tmp_path: Path, cluster: str, what: str) -> None:
    """The worker that runs a part is killed, or the raylet of its node."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "slow.py").write_text(f"NOTES = {str(notes)!r}\n{SLOW}")
    process = subprocess.Popen(
        [*COMMAND, "verify", "--strategy", "slow.py:sync", *QUICK, "--world", "3", "--on", "ray",
         "--json", "whole.json", "--deadline", "500s"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **ALONE, "RAY_ADDRESS": cluster},
    )  # fmt: skip
    end = time.monotonic() + 300
    while not list(notes.iterdir()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.2)
    ranks = [int(file.name) for file in notes.iterdir()]
    parents = [p for rank in ranks[:1] for p in psutil.Process(rank).parents()]
    workers = [p for p in parents if p.name().startswith("ray::")]
    raylet = [p for p in parents if p.name() == "raylet"]
    os.kill((workers if what == "worker" else raylet)[0].pid, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode in (3, 5), out + err
    if (tmp_path / "whole.json").exists():
        whole = json.loads((tmp_path / "whole.json").read_text())
        verdicts = {case["case"]["world"]: case["verdict"] for case in whole["cases"]}
        assert verdicts[3] == "unknown"
        assert "Ray lost its task" in json.dumps(whole["cases"])
    else:
        assert "no part returned from ray: Ray lost its task" in err
    assert not [rank for rank in ranks if psutil.pid_exists(rank)], "its ranks end with the task"
