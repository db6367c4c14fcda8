"""Two and four hosts, joined by a network that can be slow and can be cut. `torchrun` on two is an
example of the documentation (test_docs.py).
"""

import re
import time
from pathlib import Path

import pytest

from tests.launchers.namespaces import Hosts, hosts
from tests.launchers.processes import PYTHON, QUICK, finish, left_over, start

ENDLESS = """
import pathlib, torch, torch.distributed as dist

def endless(model, step):
    pathlib.Path(f"asleep-{step.rank}").touch()
    while True:
        dist.all_reduce(torch.ones(1_000_000))
"""


def by_hand(network: Hosts, *words: str) -> list[list[str]]:
    count = len(network.names)
    machine = ["--nnodes", str(count), "--master-addr", network.address(0), "--node-rank"]
    return [network.on(n, *PYTHON, *words, *machine, str(n)) for n in range(count)]


@pytest.mark.sweep
def test_four_hosts_with_latency(tmp_path: Path) -> None:
    with hosts(4, delay_ms=5) as network:
        commands = by_hand(network, *QUICK, "--world", "4")
        ends = finish([start(command, tmp_path) for command in commands])
    assert [code for code, _, _ in ends] == [0] * 4, ends
    assert re.search(r"PASS +allreduce +4 ranks", ends[0][1]), ends[0][1]
    assert all((out, err) == ("", "") for _, out, err in ends[1:])


@pytest.mark.sweep
def test_a_cable_is_pulled_in_the_middle_of_a_collective(tmp_path: Path) -> None:
    deadline_s = 6
    (tmp_path / "forever.py").write_text(ENDLESS)
    with hosts(2) as network:
        words = ["--strategy", "forever.py:endless", *QUICK[2:], "--world", "2"]
        commands = by_hand(network, *words, "--deadline", str(deadline_s))
        running = [start(command, tmp_path) for command in commands]
        while not ((tmp_path / "asleep-0").exists() and (tmp_path / "asleep-1").exists()):
            assert running[0].poll() is None, running[0].communicate()
            time.sleep(0.05)
        time.sleep(0.5)
        network.cut(1)
        begun = time.monotonic()
        ends = finish(running)
        spent_s = time.monotonic() - begun
    assert [code for code, _, _ in ends] == [4, 4], ends
    assert re.search(r"rank 1 +lost, last heard of at step 0, \w+", ends[0][1]), ends[0][1]
    assert f"(10.77.0.2) can no longer be reached: nothing was heard of it for {deadline_s} s" in (
        " ".join(ends[0][1].split())
    )
    assert f"rank 1: rank 0 sent no heartbeat for {deadline_s} s" in ends[1][2], ends[1][2]
    assert spent_s < 10 * deadline_s, "it ended, and not by a timeout of the backend's"
    assert left_over(tmp_path) == []


def test_a_host_that_cannot_be_reached(tmp_path: Path) -> None:
    with hosts(2) as network:
        network.cut(1)
        command = by_hand(network, *QUICK, "--world", "2", "--deadline", "5")[1]
        ((code, _, err),) = finish([start(command, tmp_path)])
    assert code == 3
    assert "rank 1: rank 0 at 10.77.0.1:29500 could not be reached within 5 s" in err, err
