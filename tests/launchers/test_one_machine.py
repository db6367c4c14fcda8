"""Every launcher on one machine, with the real programs; and what people get wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distcheck import backends
from tests.launchers.processes import (
    PYTHON,
    QUICK,
    clean_environment,
    finish,
    free_port,
    left_over,
    mpirun,
    start,
    start_warm,
)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
MODULE = ["-m", "distcheck", "verify"]
CONSOLE = [sys.executable, "-m", "distcheck"]


def by_hand(nodes: int, *words: str, quick: tuple[str, ...] = QUICK) -> list[list[str]]:
    """The words of a command for each machine."""
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [
        ["verify", *quick, "--nnodes", str(nodes), "--node-rank", str(n), *master, *words]
        for n in range(nodes)
    ]


MATRIX = """
[tool.distcheck]
strategies = ["allreduce"]
worlds = [3]
workloads = ["mlp:small"]
dtypes = ["float32"]
steps = 2
"""


def test_torchrun(tmp_path: Path) -> None:
    """With a matrix from a file, whose worlds give way to the one that torchrun has made; and what
    was saved is replayed in such a world, of processes that stand for torchrun's.
    """
    (tmp_path / "pyproject.toml").write_text(MATRIX)
    words = [*TORCHRUN, "2", *MODULE, "--json", "report.json", "--github", "--save", "kept"]
    ((code, out, err),) = finish([start(words, tmp_path, GITHUB_STEP_SUMMARY="summary.md")])
    assert code == 0, err
    assert out.count("PASS    allreduce   2 ranks") == 1, "rank 0 alone prints"
    report = json.loads((tmp_path / "report.json").read_text())
    checks = report["cases"][0]["checks"]
    assert {c["compared"]["ranks"] for c in checks} == {2}
    assert report["environment"]["launcher"] == "torchrun"
    assert (tmp_path / "summary.md").read_text().count("## distcheck") == 1, "rank 0 alone writes"
    (case,) = (tmp_path / "kept" / "cases").iterdir()
    place = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "another",
    }  # fmt: skip
    ends = finish(
        [start_warm(["replay", str(case)], tmp_path, **place, RANK=str(n)) for n in range(2)]
    )
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert ends[0][1].count("PASS ") == 1
    assert ends[1][1] == ""
    assert left_over(tmp_path) == []


@pytest.mark.sweep
def test_a_failure_under_torchrun_is_in_its_error_file(tmp_path: Path) -> None:
    quick = ("--strategy", "bad.py:no_sync", *QUICK[2:])
    words = [*TORCHRUN, "2", *MODULE, *quick]
    ((code, out, err),) = finish([start(words, tmp_path)])
    assert code == 1
    assert "FAIL    bad.py:no_sync   2 ranks" in out, out
    assert "exitcode  : 1" in err, err
    assert "traceback : FAIL bad.py:no_sync, world 2" in err, (
        "torchrun shows each rank's error file"
    )


@pytest.mark.sweep
def test_a_meeting_in_a_file(tmp_path: Path) -> None:
    method = ["--init-method", f"file://{tmp_path}/meeting", "--world", "3"]
    machine = [*PYTHON, *QUICK, *method, "--num-nodes", "2", "--rank"]
    ends = finish([start([*machine, n], tmp_path) for n in ("0", "1")])
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "PASS    allreduce   3 ranks" in ends[0][1], ends[0][1]
    assert ends[1][1:] == ("", "")
    assert not (tmp_path / "meeting").exists()


def test_every_process_leaves_with_the_verdict(tmp_path: Path) -> None:
    quick = ("--strategy", "bad.py:no_sync", *QUICK[2:])
    commands = by_hand(2, "--world", "2", quick=quick)
    ends = finish([start_warm(c, tmp_path) for c in commands])
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert "step 0, rank 1" in ends[0][1] or "rank 0" in ends[0][1]


def test_a_crash_elsewhere_is_told_with_its_traceback(tmp_path: Path) -> None:
    quick = ("--strategy", "bad.py:crash", *QUICK[2:])
    ends = finish([start_warm(c, tmp_path) for c in by_hand(2, "--world", "2", quick=quick)])
    assert [code for code, _, _ in ends] == [4, 4], ends
    assert "rank 1 raised" in ends[0][1], ends[0][1]
    assert "RuntimeError: the reason" in ends[0][1], ends[0][1]


@pytest.mark.sweep
def test_a_hang_elsewhere_is_told_with_its_stack(tmp_path: Path) -> None:
    quick = ("--strategy", "bad.py:hang", *QUICK[2:], "--deadline", "10")
    ends = finish([start_warm(c, tmp_path) for c in by_hand(2, "--world", "2", quick=quick)])
    assert [code for code, _, _ in ends] == [4, 4], ends
    assert "time.sleep(1000)" in ends[0][1], ends[0][1]
    assert "rank 1 was in no collective" in ends[0][1], ends[0][1]
    assert left_over(tmp_path) == []


UNLIKE = """
import torch.distributed as dist

def unlike(model):
    for number, parameter in enumerate(model.parameters()):
        gradient = parameter.grad.reshape(-1)
        half = dist.get_rank() == 1 and number == 1
        dist.all_reduce(gradient[: gradient.numel() // 2] if half else gradient)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_calls_that_do_not_match_are_named_under_mpirun(tmp_path: Path, backend: str) -> None:
    """Gloo aborts one of the processes, whose calls come from another process of the launcher's."""
    if missing := backends.missing(backend):
        pytest.skip(missing)
    (tmp_path / "unlike.py").write_text(UNLIKE)
    quick = ("--strategy", "unlike.py:unlike", *QUICK[2:], "--backend", backend, "--json", "r.json")
    ((code, _, err),) = finish([start([*mpirun(), "-n", "3", *PYTHON, *quick], tmp_path)])
    assert code == 4, err
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    (cause,) = case["diagnosis"]
    assert cause["cause"] == "collective-mismatch"
    assert "at call 2, ranks 0, 2 called all_reduce(SUM) of [128] float32 at " in cause["evidence"]
    assert "rank 1 called all_reduce(SUM) of [64] float32 at " in cause["evidence"]
    assert "most ranks agree, and rank 1 made a different call" in cause["evidence"]
    assert left_over(tmp_path) == []


def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    quick = ("--strategy", "bad.py:hang", *QUICK[2:], "--deadline", "60")
    front, other = [start_warm(c, tmp_path) for c in by_hand(2, "--world", "2", quick=quick)]
    while not (tmp_path / "asleep").exists():
        assert front.poll() is None, front.communicate()
        time.sleep(0.05)
    other.send_signal(signal.SIGKILL)
    (code, out, _), _ = finish([front, other])
    assert code == 4
    assert re.search(r"rank 1 +was lost: last heartbeat in step \d \(\w+\)", out), out
    assert "2 ranks: unreachable" in out, out
    assert "can no longer be reached: its process exited" in out, out
    assert left_over(tmp_path) == []


def test_a_front_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    quick = ("--strategy", "bad.py:hang", *QUICK[2:], "--deadline", "60")
    front, other = [start_warm(c, tmp_path) for c in by_hand(2, "--world", "2", quick=quick)]
    while not (tmp_path / "asleep").exists():
        assert front.poll() is None, front.communicate()
        time.sleep(0.05)
    front.send_signal(signal.SIGKILL)
    _, (code, _, err) = finish([front, other])
    assert code == 4
    assert "rank 1: rank 0 exited without a verdict" in err, err
    assert left_over(tmp_path) == []


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    command = by_hand(3, "--world", "3", "--deadline", "5")[0]
    ((code, _, err),) = finish([start_warm(command, tmp_path)])
    assert code == 3
    assert "ranks 1, 2 of 3 did not connect within 5 s" in err, err


@pytest.mark.sweep
def test_a_master_that_is_not_there(tmp_path: Path) -> None:
    command = by_hand(2, "--world", "2", "--deadline", "5")[1]
    ((code, _, err),) = finish([start_warm(command, tmp_path)])
    assert code == 3
    assert "rank 1: rank 0 at 127.0.0.1:" in err, err
    assert "could not be reached within 5 s (Connection refused)" in err, err


def test_a_port_in_use(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["--nnodes", "2", "--node-rank", "0", "--world", "2", "--master-addr", "127.0.0.1"]
        words += ["--master-port", str(taken.getsockname()[1])]
        ((code, _, err),) = finish([start_warm(["verify", *QUICK, *words], tmp_path)])
    assert code == 3
    assert "Address already in use; another program may use the port" in err, err


def test_another_file_on_one_of_the_machines(tmp_path: Path) -> None:
    quick = ("--strategy", "bad.py:good", *QUICK[2:])
    commands = by_hand(2, "--world", "2", quick=quick)
    places = [tmp_path / "a", tmp_path / "b"]
    places[1].mkdir()
    (places[1] / "bad.py").write_text("def good(model): pass\n")
    ends = finish([start_warm(c, p) for c, p in zip(commands, places, strict=True)])
    assert [code for code, _, _ in ends] == [3, 3], ends
    assert "the code of strategy bad.py:good differs" in ends[0][2], ends[0][2]
    assert "for rank 1 on" in ends[0][2], ends[0][2]


@pytest.mark.sweep
def test_another_matrix_on_one_of_the_machines(tmp_path: Path) -> None:
    commands = by_hand(2, "--world", "2", quick=())
    places = [tmp_path / "a", tmp_path / "b"]
    for place, steps in zip(places, (2, 3), strict=True):
        place.mkdir()
        (place / "pyproject.toml").write_text(MATRIX.replace("steps = 2", f"steps = {steps}"))
    ends = finish([start_warm(c, p) for c, p in zip(commands, places, strict=True)])
    assert [code for code, _, _ in ends] == [3, 3], ends
    assert "the request differs: " in ends[0][2], ends[0][2]


def test_no_file_on_one_of_the_machines(tmp_path: Path) -> None:
    quick = ("--strategy", "mine.py:good", *QUICK[2:])
    commands = by_hand(2, "--world", "2", quick=quick)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.py").write_text("def good(model): pass\n")
    ends = finish([start_warm(c, tmp_path / p) for c, p in zip(commands, ("a", "b"), strict=True)])
    assert [code for code, _, _ in ends] == [3, 2], ends
    assert "cannot take part: strategy file mine.py does not exist" in ends[0][2], ends[0][2]


def test_different_worlds(tmp_path: Path) -> None:
    port = str(free_port())
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ends = finish([
        start_warm(["verify", *QUICK], tmp_path, **place, RANK="0", WORLD_SIZE="2"),
        start_warm(["verify", *QUICK], tmp_path, **place, RANK="1", WORLD_SIZE="3"),
    ])  # fmt: skip
    assert [code for code, _, _ in ends] == [3, 3], ends
    assert "was started for a world of 3 ranks, but rank 0 for 2" in ends[0][2], ends[0][2]


@pytest.mark.sweep
def test_other_versions(tmp_path: Path) -> None:
    """A process with another version of distcheck: the version alone is changed there."""
    commands = by_hand(2, "--world", "2")
    other = (
        "import sys, distcheck; distcheck.__version__ = '9.9'; "
        "from distcheck.cli import main; main()"
    )
    starts = [CONSOLE, [sys.executable, "-c", other]]
    ends = finish([start([*s, *c], tmp_path) for s, c in zip(starts, commands, strict=True)])
    assert [code for code, _, _ in ends] == [3, 3], ends
    assert "the version of distcheck differs: 9.9 for rank 1 on" in ends[0][2], ends[0][2]


def test_a_bad_option_is_said_once_by_each_and_waits_for_nobody(tmp_path: Path) -> None:
    words = [*TORCHRUN, "2", *MODULE, *QUICK, "--world", "3"]
    ((code, _, err),) = finish([start(words, tmp_path)])
    assert code == 1, "torchrun's own"
    assert "--world 3 was given, but torchrun started 2 ranks" in err, err
    assert "did not connect" not in err, err
    assert "could not be reached" not in err, err


@pytest.mark.sweep
def test_a_stranger_at_the_door(tmp_path: Path) -> None:
    """Somebody else's connection disturbs nothing."""
    import socket

    commands = by_hand(2, "--world", "2")
    port = int(commands[0][commands[0].index("--master-port") + 1])
    front = start_warm(commands[0], tmp_path)
    for _ in range(200):
        try:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            break
        except OSError:
            time.sleep(0.05)
    ends = finish([front, start_warm(commands[1], tmp_path)])
    assert [code for code, _, _ in ends] == [0, 0], ends


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.sweep), signal.SIGKILL]
)
def test_nothing_is_left_when_torchrun_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    quick = ("--strategy", "bad.py:hang", *QUICK[2:], "--deadline", "60")
    words = [*TORCHRUN, "2", *MODULE, *quick]
    launcher = start(words, tmp_path)
    while not (tmp_path / "asleep").exists():
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    launcher.send_signal(number)
    finish([launcher])
    assert left_over(tmp_path) == []


def test_ctrl_c_under_torchrun(tmp_path: Path) -> None:
    """A terminal sends it to everybody; rank 0 alone answers."""
    quick = ("--strategy", "bad.py:hang", *QUICK[2:], "--deadline", "60")
    words = [*TORCHRUN, "2", "-m", "distcheck", "verify", *quick]
    # A background shell has children ignore interrupts; a session of its own gets the signal.
    hear = "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.setsid(); "
    hear += "os.execvp(sys.argv[1], sys.argv[1:])"
    launcher = start([sys.executable, "-c", hear, *words], tmp_path)
    while not (tmp_path / "asleep").exists():
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    os.killpg(launcher.pid, signal.SIGINT)
    ((_, _, err),) = finish([launcher])
    assert err.count("nothing is left running") == 1
    assert left_over(tmp_path) == []


def test_help_and_detection_import_no_torch() -> None:
    program = (
        "import sys; from distcheck.worlds.launchers import detect; "
        "import distcheck.cli.under_launchers; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], env=clean_environment())
    assert done.returncode == 0


@pytest.mark.sweep
def test_other_commands_under_torchrun(tmp_path: Path) -> None:
    """Training is one world, of the launcher's ranks; what makes no world runs once."""
    words = ["train", "--strategy", "allreduce", "--workload", "mlp", "--steps", "2"]
    ((code, out, err),) = finish(
        [start([*TORCHRUN, "2", "-m", "distcheck", *words, "--json", "t.json"], tmp_path)]
    )
    assert code == 0, err
    assert out.count("epoch 1/1: loss") == 1
    assert json.loads((tmp_path / "t.json").read_text())["case"]["world"] == 2
    ((code, out, err),) = finish([start([*TORCHRUN, "2", "-m", "distcheck", "list"], tmp_path)])
    assert (code, out.count("strategies\n")) == (0, 1), err


@pytest.mark.sweep
def test_a_process_that_goes_before_any_world(tmp_path: Path) -> None:
    commands = by_hand(2, "--world", "2", "--deadline", "10")
    front, other = [start([*CONSOLE, *c], tmp_path) for c in commands]
    time.sleep(0.7)  # while torch is imported
    other.send_signal(signal.SIGKILL)
    (code, out, err), _ = finish([front, other])
    assert code in (3, 4), err
    said = " ".join((out + err).split())
    lost = "rank 1 on" in said and "can no longer be reached: its process exited" in said
    assert lost or "rank 1 of 2 did not connect" in said, "killed before it had connected"


@pytest.mark.sweep
def test_mpich_through_a_shell(tmp_path: Path) -> None:
    """A shell between MPICH's proxy and its ranks is no other job: they share an ancestor."""
    proxy = tmp_path / "bin" / "hydra_pmi_proxy"
    proxy.parent.mkdir()
    command = " ".join([*PYTHON, *QUICK, "--deadline", "10"])
    proxy.write_text(
        "#!/bin/bash\n"
        f"for rank in 0 1; do PMI_RANK=$rank PMI_SIZE=2 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=$rank "
        f"bash -c '{command}; exit $?' & done; wait %1 && wait %2\n"
    )
    proxy.chmod(0o755)
    ((code, out, err),) = finish([start([str(proxy)], tmp_path)])
    assert code == 0, err
    assert "PASS    allreduce   2 ranks" in out, out
