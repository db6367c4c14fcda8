"""How sessions with worlds end: by a limit, Ctrl-C, a signal, a worker that crashes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from distcheck.records import Collective
from distcheck.testing.waiting import describe_ranks
from distcheck.worlds import messages
from distcheck.worlds.remote.coordinator import RemoteChild
from tests.waiting import wait_until
from tests.world.command import hear_interrupts

Run = Callable[..., subprocess.CompletedProcess[str]]

NOTES = """
import os, time
FRESH, KEPT = pytest.mark.world(2), pytest.mark.world(2, reuse=True)
both = pytest.mark.parametrize(
    "kind", [pytest.param("fresh", marks=FRESH), pytest.param("kept", marks=KEPT)]
)

def note(what):
    for pid in (os.getpid(), os.getppid()):  # a rank, and the helper
        open(f"pid-{pid}-{what}", "w").close()

# No limit and no signal strikes in the first world, while torch is imported.
@both
def test_first(world, kind): note("first")
"""

HANGS = """
@both
@pytest.mark.timeout(5)
def test_hangs(world, kind):
    note("hung")
    if world.rank:
        time.sleep(1000)
    world.barrier()
"""

HANGS_HERE = """
@KEPT
def test_kept(world): note("last")

@pytest.mark.timeout(2)
def test_hangs_here(): time.sleep(999)

def test_next(): pass
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--timeout-method", "signal"],
        pytest.param(["--timeout-method", "thread", "-n", "1"], marks=pytest.mark.sweep),
    ],
    ids=["signal", "thread-xdist"],
)
def test_a_timeout_tells_the_ranks_stacks(run: Run, tmp_path: Path, options: list[str]) -> None:
    """By either method, fresh and kept. A test that hangs without a world is pytest-timeout's own
    affair, which by thread ends the process; a kept world ends with it.
    """
    ran = run(NOTES + HANGS + HANGS_HERE, *options, new=True)
    assert "3 failed, 4 passed" in ran.stdout, ran.stdout
    assert ran.stdout.count("Timeout (>5.0s) from pytest-timeout.") == 2
    assert ran.stdout.count("\nrank 1 of 2 hung:\n") == 2
    assert ran.stdout.count("\n    time.sleep(1000)\n") == 2
    assert ran.stdout.count("\nlast collective: barrier, number 1, not finished") == 2
    assert ("crashed while running" in ran.stdout) == ("thread" in options)
    assert_gone(tmp_path, 15)


def test_the_session_may_end_at_a_failure(run: Run, tmp_path: Path) -> None:
    """What -x does at the first one; fresh, kept, and while another kept world lives."""
    ran = run(
        NOTES + "@both\n"
        "def test_fails(world, kind):\n"
        "    note('fails')\n"
        "    world.barrier()\n"
        "    assert world.rank\n"
        "@pytest.mark.world(1, reuse=True)\n"
        "def test_other(world): note('other')\n"
        "@FRESH\n"
        "def test_fails_last(world): test_fails(world, 'fresh')\n"
        "@FRESH\n"
        "def test_never(world): pass\n",
        "--maxfail=3",
    )
    assert "3 failed, 3 passed" in ran.stdout, ran.stdout
    assert_gone(tmp_path, 17)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        pytest.param([], signal.SIGINT, id="alone-2"),
        pytest.param([], signal.SIGKILL, id="alone-9"),
        pytest.param(["-n", "2"], signal.SIGKILL, id="xdist-9", marks=pytest.mark.sweep),
        pytest.param([], signal.SIGTERM, id="alone-15", marks=pytest.mark.sweep),
        pytest.param(["-n", "2"], signal.SIGINT, id="xdist-2", marks=pytest.mark.sweep),
        pytest.param(["-n", "2"], signal.SIGTERM, id="xdist-15", marks=pytest.mark.sweep),
    ],
)
def test_no_process_survives(tmp_path: Path, number: signal.Signals, options: list[str]) -> None:
    """A fresh world that hangs, and a kept one that waits."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n" + NOTES + HANGS.replace("@both", "@FRESH").replace(", kind", "")
    )
    (tmp_path / "temporary").mkdir()
    shared = shared_memory()
    with (tmp_path / "printed").open("w") as printed:
        front = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:timeout",
             "--dist", "loadfile", *options],
            cwd=tmp_path, stdout=printed, stderr=printed, preexec_fn=hear_interrupts,
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, start_new_session=True,
        )  # fmt: skip
    wait_until(lambda: len(list(tmp_path.glob("pid-*-hung"))) == 3)
    if number == signal.SIGINT:
        time.sleep(1)  # rank 0 has noted that it is there, and enters the barrier
        os.killpg(front.pid, number)  # as a terminal does
    else:
        front.send_signal(number)
    front.wait(60)
    assert_gone(tmp_path, 9)
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in left if not name.startswith(("torchinductor", "pytest-of-"))]
    wait_until(lambda: not abandoned(shared_memory() - shared))
    if number == signal.SIGINT and not options:
        assert_told((tmp_path / "printed").read_text())


def assert_told(printed: str) -> None:
    """What an interrupted world was doing, before pytest says that it was interrupted."""
    told = printed.partition("interrupted: test_it.py::test_hangs")[2]
    one, _, rest = told.partition("\nrank 0 of 2, last collective: barrier, number 1, not fin")
    assert "\nrank 1 of 2\n" in one, printed
    assert one.endswith("\n    time.sleep(1000)")
    assert "\n    world.barrier()\n" in rest
    assert "! KeyboardInterrupt !" in rest


def test_an_answer_to_an_interrupt_is_shown_once_for_ranks_alike() -> None:
    children = [RemoteChild() for _ in range(5)]
    for child in children[:2]:
        call = Collective(number=1, name="barrier", shapes="", finished=False, place="x.py:3")
        child.stacks = messages.Stacks("there\n", call)
    children[2].stacks = messages.Stacks("elsewhere\n", None)
    assert describe_ranks(children, {4}).splitlines() == [
        "rank 2 of 5", "elsewhere", "rank 3 of 5 did not respond", "rank 4 of 5 had ended",
        "ranks 0, 1 of 5, last collective: barrier, number 1, not finished at x.py:3",
        "there",
    ]  # fmt: skip


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("distcheck-mpi-")}


def abandoned(names: set[str]) -> set[str]:
    """Which of these nobody uses: the whole machine shares it, and others have files there, too."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used = maps.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in used}
    return names & shared_memory()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_gone(folder: Path, count: int) -> None:
    """The processes that left a note, of which there are `count`."""
    notes = {path.name for path in folder.glob("pid-*")}
    assert len(notes) == count, notes
    wait_until(lambda: all(is_gone(int(note.split("-")[1])) for note in notes))


@pytest.mark.sweep
def test_a_worker_of_xdist_that_crashes_takes_nobody_along(run: Run, tmp_path: Path) -> None:
    """Its ranks end with it; another worker goes on."""
    ran = run(
        NOTES + "@pytest.mark.world(2)\n"
        "def test_crashes(world):\n"
        "    note('crash')\n"
        "    world.barrier()\n"
        "    if world.rank == 0:\n"
        "        world_of = os.getppid()\n"
        "        stat = open(f'/proc/{world_of}/stat').read()\n"
        "        pytest_process = int(stat.rpartition(')')[2].split()[1])\n"
        "        os.kill(pytest_process, 9)\n"
        "    time.sleep(1000)\n"
        "@pytest.mark.world(2)\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_ok_after(world, number): assert world.gather(1) == [1, 1]\n",
        "-n", "2", new=True,
    )  # fmt: skip
    assert "1 failed, 8 passed" in ran.stdout, ran.stdout
    assert "crashed while running" in ran.stdout
    assert_gone(tmp_path, 9)
