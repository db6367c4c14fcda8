"""What launchers do when a process dies, or a cluster ends a job, and what is then reported."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launchers.namespaces import hosts
from tests.launchers.processes import QUICK, finish, left_over, start
from tests.launchers.test_docs import SRUN
from tests.launchers.test_one_machine import MODULE, TORCHRUN
from tests.launchers.test_several_machines import ENDLESS, by_hand

# The process that the launcher started is the one that started this rank's helper.
DIES = """
import os, pathlib, signal
import torch.distributed as dist

def dies(model, step):
    if step.rank == step.world_size - 1 and step.index == 1:
        stat = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        signal.pause()  # it ends with its process, and trains no further until then
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
"""
WORDS = ["--strategy", "dies.py:dies", *QUICK[2:], "--deadline", "60", "--json", "r.json"]


def assert_lost(folder: Path, rank: int, world: int) -> None:
    """That the report names the rank whose process died, and accuses no other."""
    document = json.loads((folder / "r.json").read_text())
    assert document["exit_code"] == 4
    outcomes: list[dict[str, Any]] = document["cases"][0]["outcomes"]
    assert len(outcomes) == world
    ends = {entry["rank"]: entry["outcome"] for entry in outcomes}
    assert outcomes[0]["rank"] == rank
    assert ends.pop(rank) == "lost"
    assert set(ends.values()) <= {"raised", "ended"}, outcomes
    assert document["cases"][0]["diagnosis"][0]["cause"] == "unreachable"
    assert left_over(folder) == []


def test_a_process_that_dies_under_torchrun_is_lost(tmp_path: Path) -> None:
    """torchrun ends all others with SIGTERM, which is no interruption by a person."""
    (tmp_path / "dies.py").write_text(DIES)
    ((code, out, err),) = finish([start([*TORCHRUN, "2", *MODULE, *WORDS], tmp_path)])
    assert code == 1, "torchrun's own"
    assert "interrupted" not in err, err
    assert re.search(r"rank 1 +was lost: last heartbeat in step \d", out), out
    assert_lost(tmp_path, 1, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("each", [1, 2])
def test_a_death_in_the_middle_of_torchrun_on_two_nodes(tmp_path: Path, each: int) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    with hosts(2) as network:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        words += ["--nproc-per-node", str(each), "--master-addr", network.address(0)]
        commands = [
            network.on(n, *words, "--master-port", "29500", "--node-rank", str(n), *MODULE, *WORDS)
            for n in range(2)
        ]
        ends = finish([start(command, tmp_path) for command in commands])
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert_lost(tmp_path, 2 * each - 1, 2 * each)


def test_packets_that_are_dropped_without_a_word(tmp_path: Path) -> None:
    """Both cables stay in, and no packet of host 1's reaches host 0."""
    (tmp_path / "forever.py").write_text(ENDLESS)
    with hosts(2) as network:
        words = ["--strategy", "forever.py:endless", *QUICK[2:], "--world", "2"]
        commands = by_hand(network, *words, "--deadline", "6", "--json", "r.json")
        running = [start(command, tmp_path) for command in commands]
        while not ((tmp_path / "asleep-0").exists() and (tmp_path / "asleep-1").exists()):
            assert running[0].poll() is None, running[0].communicate()
            time.sleep(0.05)
        network.drop(1, to=0)
        ends = finish(running)
    assert [code for code, _, _ in ends] == [4, 4], ends
    assert "it sent no heartbeat for 6 s" in " ".join(ends[0][1].split()), ends[0][1]
    assert_lost(tmp_path, 1, 2)


def srun(folder: Path) -> list[str]:
    """What stands for srun, for two tasks."""
    script = folder / "srun"
    script.write_text(SRUN.format(python=sys.executable))
    return [sys.executable, str(script), "-n", "2", sys.executable, *MODULE]


@pytest.mark.sweep
def test_a_job_that_a_cluster_cancels_ends_as_ctrl_c_does(tmp_path: Path) -> None:
    """Slurm signals every process of a step: tasks, helpers and ranks."""
    quick = ["--strategy", "bad.py:hang", *QUICK[2:], "--deadline", "60", "--json", "r.json"]
    step = start([*srun(tmp_path), *quick], tmp_path)
    while not (tmp_path / "asleep").exists():
        assert step.poll() is None, step.communicate()
        time.sleep(0.05)
    for process in psutil.Process(step.pid).children(recursive=True):
        process.send_signal(signal.SIGTERM)
    ((code, out, err),) = finish([step])
    assert code == 130, err
    assert err.count("nothing is left running") == 1, err
    assert "were not judged: bad.py:hang" in out, out
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["verdict"], document["exit_code"]) == ("unknown", 130)
    assert left_over(tmp_path) == []


def test_a_task_that_dies_under_srun_is_lost(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    ((code, out, _),) = finish([start([*srun(tmp_path), *WORDS], tmp_path)])
    assert code == 4, out
    assert_lost(tmp_path, 1, 2)
