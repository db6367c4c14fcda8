"""torchrun starts everything anew: what had been judged stays judged, other ranks are no answer."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.processes import (
    QUICK,
    clean_environment,
    finish,
    free_port,
    left_over,
    start,
    start_warm,
)
from tests.launchers.test_one_machine import MODULE

ELASTIC = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]

# In its second case, once the first has been judged, rank 1's process dies; once in the run.
DIES_ONCE = """
import os, pathlib, signal, time
import torch.distributed as dist

def dies_once(model, step):
    second = any(p.dim() == 4 for p in model.parameters())
    if step.rank == 1 and second and not pathlib.Path("died").exists():
        while not list(pathlib.Path("kept/finished").glob("*mlp*.json")):
            time.sleep(0.01)
        pathlib.Path("died").touch()
        # The process that torchrun started is the one that started this rank's helper.
        stat = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= step.world_size
"""


@pytest.mark.sweep
def test_a_restart_takes_up_what_was_saved(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DIES_ONCE)
    words = [*ELASTIC, "--nproc-per-node", "2", "--max-restarts", "2", *MODULE]
    words += ["--strategy", "mine.py:dies_once", "--workload", "mlp", "--workload"]
    words += ["cnn", "--dtype", "float32", "--steps", "2", "--save", "kept", "--json", "r.json"]
    ((code, out, err),) = finish([start(words, tmp_path)])
    assert code == 0, err
    assert (tmp_path / "died").exists()
    report = json.loads((tmp_path / "r.json").read_text())
    assert [case["verdict"] for case in report["cases"]] == ["pass", "pass"]
    notes = [case["notes"] for case in report["cases"]]
    assert "judged before a restart" in str(notes[0])
    assert "judged before a restart" not in str(notes[1])
    assert "PASS" in out, out


def starts(folder: Path, count: int) -> tuple[list[int], dict[str, Any]]:
    """What torchrun's `count`-th start of a world of two comes to: exit codes, and the report."""
    about = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "run-7", "TORCHELASTIC_RESTART_COUNT": str(count),
        "TORCHELASTIC_ERROR_FILE": "error.json",
    }  # fmt: skip
    words = ["verify", *QUICK, "--save", "kept", "--json", "r.json"]
    ends = finish([start_warm(words, folder, **about, RANK=str(n)) for n in range(2)])
    return [code for code, _, _ in ends], json.loads((folder / "r.json").read_text())


@pytest.mark.sweep
def test_a_case_is_finished_when_it_is_saved(tmp_path: Path) -> None:
    """A start that lost a rank has left traces, or one was killed while it wrote them: they make
    room. What could not be saved is run again, and why it failed is what torchrun is told.
    """
    kept = tmp_path / "kept"
    assert starts(tmp_path, 0)[0] == [0, 0]
    (finished,) = (kept / "finished").iterdir()
    (traces,) = (kept / "traces").iterdir()

    finished.unlink()
    (traces / "about.json").write_text("of a start that was given up")
    codes, report = starts(tmp_path, 1)
    assert codes == [0, 0]
    assert "judged before" not in str(report["cases"][0]["notes"])
    assert finished.exists()
    assert json.loads((traces / "about.json").read_text())

    finished.unlink()
    shutil.rmtree(kept / "traces")
    (kept / "traces").touch()  # a file where a folder has to be
    codes, report = starts(tmp_path, 2)
    assert codes == [3, 3]
    assert report["cases"][0]["verdict"] == "pass"
    assert "could not be saved" in (tmp_path / "error.json").read_text()
    assert not finished.exists()

    (kept / "traces").unlink()
    codes, report = starts(tmp_path, 3)
    assert codes == [0, 0]
    assert "judged before" not in str(report["cases"][0]["notes"])
    assert (traces / "about.json").exists()
    codes, report = starts(tmp_path, 4)
    assert codes == [0, 0]
    assert "judged before" in str(report["cases"][0]["notes"])


FALLS_ASLEEP = """
import pathlib, time

def falls_asleep(model, step):
    if step.world_size == 2:
        pathlib.Path("asleep").touch()
        time.sleep(1000)
"""


@pytest.mark.sweep
def test_a_run_that_loses_a_machine_goes_on_and_verifies_nothing(tmp_path: Path) -> None:
    """The second agent is killed; the first starts its rank anew, in a world of one, where
    everything would pass.
    """
    (tmp_path / "mine.py").write_text(FALLS_ASLEEP)
    meet = [*ELASTIC, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "shrinks"]
    meet += ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1"]
    job = [*MODULE, "--strategy", "mine.py:falls_asleep", *QUICK[2:], "--json", "r.json"]
    # The seconds for which one alone waits for another, and after which a silent one is given up.
    about = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=5,is_host="
    agents = [
        start([*meet, "--rdzv-conf", about + is_host, *job], tmp_path) for is_host in ("1", "0")
    ]
    try:
        while not (tmp_path / "asleep").exists():
            assert [agent.poll() for agent in agents] == [None, None], "an agent has ended"
            time.sleep(0.05)
        agents[1].kill()
        ((code, out, err),) = finish(agents[:1])
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert code == 1, err
    assert "exitcode  : 5" in err, err
    assert "UNKNOWN mine.py:falls_asleep   1 rank" in out, out
    assert "started this run with 2 ranks and restarted it with 1" in " ".join(out.split())
    assert "torch None" not in out, out
    report = json.loads((tmp_path / "r.json").read_text())
    assert [case["verdict"] for case in report["cases"]] == ["unknown"]
    assert left_over(tmp_path) == []


@pytest.mark.sweep
def test_another_number_of_ranks_is_unknown(tmp_path: Path) -> None:
    """What a store says that outlives the first start, as torchrun's does."""
    serve = (
        "import torch.distributed as dist, sys; "
        "s = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
        "s.set('distcheck/run-7/size', '4'); print(s.port, flush=True); sys.stdin.read()"
    )
    store = subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=clean_environment(),
    )  # fmt: skip
    try:
        assert store.stdout is not None
        about = {
            "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.stdout.readline().strip(),
            "TORCHELASTIC_RUN_ID": "run-7", "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        command = [sys.executable, *MODULE, *QUICK, "--json", "r.json"]
        ends = finish([start(command, tmp_path, **about, RANK=str(n)) for n in range(2)])
    finally:
        store.kill()
        store.wait()
    assert [code for code, _, _ in ends] == [5, 5], ends
    assert "started this run with 4 ranks and restarted it with 2" in " ".join(ends[0][1].split())
    report = json.loads((tmp_path / "r.json").read_text())
    assert [case["verdict"] for case in report["cases"]] == ["unknown"]
