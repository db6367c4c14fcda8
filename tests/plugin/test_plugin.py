"""The plugin as a guest in somebody's pytest: what it costs, refuses, and leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from distcheck.testing import interrupts
from distcheck.worlds import messages
from distcheck.worlds.links import RemoteChild
from tests.world.command import hear_interrupts

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Writes test_it.py and runs pytest on it, in a folder of its own."""

    def go(text: str, *options: str, **more: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text("import pytest\n" + text)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *options],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=400,
            **more,  # type: ignore[call-overload]
        )

    return go


def test_it_is_inert_until_it_is_used(run: Run) -> None:
    ran = run("import sys\ndef test_nothing(): assert 'torch' not in sys.modules\n", "-W", "error")
    assert ran.returncode == 0, ran.stdout


def test_without_the_plugin_the_marker_is_unknown(run: Run) -> None:
    text = "@pytest.mark.world(2)\ndef test_it(world): pass\n"
    ran = run(text, "-p", "no:distcheck", "--strict-markers")
    assert ran.returncode == 2
    assert "'world' not found in `markers`" in ran.stdout


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        ("world()", "needs the number of ranks"),
        ("world(0)", "was given the size 0; it takes 1 to 256 ranks"),
        ("world('4')", "was given the size '4'"),
        ("world([])", "was given an empty list of sizes: nothing would run"),
        ("world(2, 3)", "takes one size, or a list of them"),
        ("world(2, colour='red')", "takes no colour"),
        ("world(2, deadline_s=0)", "was given deadline_s=0; it takes seconds, more than 0"),
        ("world(2, device='tpu')", "was given device='tpu'; it takes 'cpu' or 'cuda'"),
        ("world(2, reuse=1)", "was given reuse=1; it takes a bool"),
    ],
)
def test_a_bad_marker_gets_a_sentence(run: Run, marker: str, sentence: str) -> None:
    ran = run(f"@pytest.mark.{marker}\ndef test_it(world): pass\n")
    assert ran.returncode != 0
    assert sentence in ran.stdout + ran.stderr
    assert "1 passed" not in ran.stdout


LATE = """
import unittest
TWO_OR_THREE = pytest.mark.world([2, 3])

@pytest.fixture
def world_size(world): return f"mine: {world.size}"

@TWO_OR_THREE
def test_fixture(world, world_size): assert world_size == f"mine: {world.size}"

@TWO_OR_THREE
@pytest.mark.parametrize("world_size", [5])
def test_parameter(world, world_size): assert world_size == 5

def test_marked_late(world): pass

@pytest.mark.parametrize("n", [pytest.param(1, marks=TWO_OR_THREE)])
def test_marked_as_a_parameter(world, n): pass

@pytest.mark.world(2)
class TestUnit(unittest.TestCase):
    def test_it(self): pass
"""


def test_sizes_are_chosen_at_collection(run: Run, tmp_path: Path) -> None:
    """And under a name of the plugin's own; whatever cannot be run is refused in a sentence."""
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        if item.name == 'test_marked_late': item.add_marker(pytest.mark.world([2, 3]))\n"
    )
    ran = run(LATE, "-rA", "-p", "no:capture")  # which takes the option along
    assert "4 passed, 3 errors" in ran.stdout, ran.stdout
    for name in ("fixture[world2]", "fixture[world3]", "parameter[world2-5]"):
        assert f"PASSED test_it.py::test_{name}\n" in ran.stdout
    assert ran.stdout.count("\nthe marker `world` was given the sizes [2, 3] by add_marker or") == 2
    assert "\ntest_it: a test in a world is a plain function, or a method of" in ran.stdout
    assert "pytest_plugin.py" not in ran.stdout
    assert "During handling" not in ran.stdout


def test_a_group_in_the_pytest_process_is_refused(run: Run) -> None:
    ran = run(
        "import torch.distributed as dist\n"
        "def test_opens():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "@pytest.mark.world(2)\n"
        "def test_it(world): pass\n"
    )
    assert "1 failed, 1 passed" in ran.stdout
    assert "must call destroy_process_group()" in ran.stdout


def test_a_backend_that_is_not_there(run: Run) -> None:
    ran = run("@pytest.mark.world(2, backend='nope')\ndef test_it(world): pass\n")
    assert ran.returncode == 1
    assert "nope" in ran.stdout


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
@pytest.mark.timeout(10)
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
    [["--timeout-method", "signal"], ["--timeout-method", "thread", "-n", "1"]],
    ids=["signal", "thread-xdist"],
)
def test_a_timeout_tells_the_ranks_stacks(run: Run, tmp_path: Path, options: list[str]) -> None:
    """By either method, fresh and kept. A test that hangs without a world is pytest-timeout's own
    affair, which by thread ends the process; a kept world ends with it.
    """
    ran = run(NOTES + HANGS + HANGS_HERE, *options)
    assert "3 failed, 4 passed" in ran.stdout, ran.stdout
    assert ran.stdout.count("Timeout (>10.0s) from pytest-timeout.") == 2
    assert ran.stdout.count("\nrank 1 of 2 hung:\n") == 2
    assert ran.stdout.count("\n    time.sleep(1000)\n") == 2
    assert ran.stdout.count("\nlast collective: barrier of [], number 1, not finished") == 2
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
        pytest.param(["-n", "2"], signal.SIGKILL, id="xdist-9"),
        pytest.param([], signal.SIGTERM, id="alone-15", marks=pytest.mark.sweep),
        pytest.param(["-n", "2"], signal.SIGINT, id="xdist-2", marks=pytest.mark.sweep),
        pytest.param(["-n", "2"], signal.SIGTERM, id="xdist-15", marks=pytest.mark.sweep),
    ],
)
def test_nothing_survives_pytest(
    tmp_path: Path, number: signal.Signals, options: list[str]
) -> None:
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
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("pid-*-hung"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if number == signal.SIGINT:
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
    one, _, rest = told.partition(
        "\nrank 0 of 2, last collective: barrier of [], number 1, not fin"
    )
    assert "\nrank 1 of 2\n" in one, printed
    assert one.endswith("\n    time.sleep(1000)")
    assert "\n    world.barrier()\n" in rest
    assert "! KeyboardInterrupt !" in rest


def test_an_answer_to_an_interrupt_is_shown_once_for_ranks_alike() -> None:
    children = [RemoteChild() for _ in range(5)]
    for child in children[:2]:
        child.stacks = messages.Stacks("there\n", "barrier of [], number 1, not finished at x.py:3")
    children[2].stacks = messages.Stacks("elsewhere\n", "")
    assert interrupts.describe(children, {4}).splitlines() == [
        "rank 2 of 5",
        "elsewhere",
        "rank 3 of 5 did not answer",
        "rank 4 of 5 had ended",
        "ranks 0, 1 of 5, last collective: barrier of [], number 1, not finished at x.py:3",
        "there",
    ]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("distcheck-mpi-")}


def abandoned(names: set[str]) -> set[str]:
    """Which of these nobody uses: the whole machine shares it, and others have files there, too."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used = maps.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in used}
    return names & shared_memory()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
        "-n", "2",
    )  # fmt: skip
    assert "1 failed, 8 passed" in ran.stdout, ran.stdout
    assert "crashed while running" in ran.stdout
    assert_gone(tmp_path, 9)


QUIET = """
import threading
FRESH, KEPT = pytest.mark.world(2), pytest.mark.world(2, reuse=True)
both = pytest.mark.parametrize(
    "kind", [pytest.param("fresh", marks=FRESH), pytest.param("kept", marks=KEPT)]
)

@both
def test_thread(world, kind):
    if world.rank == 1:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

@both
def test_thread_and_failure(world, kind):
    test_thread(world, kind)
    assert world.rank == 0, "on its own account"

@both
def test_finalizer(world, kind):
    class Fragile:
        def __del__(self):
            raise ValueError("while it was deleted")
    Fragile()
"""


def test_what_nobody_could_catch_is_a_warning_as_ever(run: Run) -> None:
    """Of threads an error here, and of finalizers a warning."""
    ran = run(QUIET, "-W", "error::pytest.PytestUnhandledThreadExceptionWarning")
    assert "4 failed, 2 passed, 2 warnings" in ran.stdout, ran.stdout
    assert ran.stdout.count("test_thread[fresh] - rank 1 of 2: pytest.PytestUnhandled") == 1
    assert ran.stdout.count("test_thread[kept] - rank 1 of 2: pytest.PytestUnhandled") == 1
    assert ran.stdout.count("E   ZeroDivisionError: division by zero") == 2
    assert ran.stdout.count("AssertionError: on its own account") >= 2
    assert ran.stdout.count("E   also: Exception in thread") == 2
    assert ran.stdout.count("PytestUnraisableExceptionWarning: Exception ignored in") == 2
    assert "entries are hidden" not in ran.stdout


SUBTESTS = """
import torch.distributed as dist
FRESH, KEPT = pytest.mark.world(2), pytest.mark.world(2, reuse=True)
both = pytest.mark.parametrize(
    "kind", [pytest.param("fresh", marks=FRESH), pytest.param("kept", marks=KEPT)]
)

@both
def test_one_fails(world, kind, subtests):
    for number in range(3):
        with subtests.test(number=number):
            print("printed in", number)
            assert number != 1 or world.rank == 0

@both
def test_all_fail(world, kind, subtests):
    with subtests.test("mine"):
        assert world.rank == 9

@both
def test_fine(world, kind, subtests, capsys):
    with subtests.test("left out"):
        pytest.skip("not here")
    with capsys.disabled(), subtests.test("mine"):
        print("to the terminal")

@pytest.mark.world(2, deadline_s=1)
def test_hangs(world, subtests):
    with subtests.test("mine"):
        assert world.rank == 0
        dist.barrier()
"""


def test_a_failed_subtest_fails_its_test(run: Run) -> None:
    pytest.importorskip("_pytest.subtests", reason="pytest has the fixture from 9.0 on")
    ran = run(SUBTESTS)
    for kind in ("fresh", "kept"):
        one, every = f"test_it.py::test_one_fails[{kind}]", f"test_it.py::test_all_fail[{kind}]"
        assert f"SUBFAILED(number=1) {one} - rank 1 of 2: assert" in ran.stdout, ran.stdout
        assert f"FAILED {one} - Failed: contains 1 failed subtest: " in ran.stdout
        assert f"SUBFAILED[mine] {every} - all 2 ranks: assert 0 == 9" in ran.stdout
        assert f"FAILED {every} - Failed: contains 1 failed" in ran.stdout
    assert ran.stdout.count("Captured stdout call of rank 1") == 2
    assert "printed in 1" in ran.stdout
    assert "printed in 0" not in ran.stdout
    assert "SUBFAILED[mine] test_it.py::test_hangs - rank 1 of 2: assert 1 == 0" in ran.stdout
    assert "FAILED test_it.py::test_hangs - rank 0 of 2: hung" in ran.stdout
    assert "rank 1 of 2 had finished" in ran.stdout
    assert "\ntest_it.py uFuFuFuF..uF " in ran.stdout, "ranks write nothing to the terminal"


def test_no_debugger_starts_in_a_rank(run: Run) -> None:
    """It would read the end of an empty input, and quit: what never ran would have passed."""
    text = "@pytest.mark.world(2)\ndef test_it(world): assert 0\n"
    ran = run(text, "--trace", stdin=subprocess.DEVNULL)
    assert "1 failed" in ran.stdout, ran.stdout
    assert "--trace: a rank has no terminal that a debugger could use" in ran.stdout


def test_output_is_live_without_capture(run: Run) -> None:
    text = "@pytest.mark.world(2)\ndef test_it(world): print('I am', world.rank)\n"
    ran = run(text, "-s")
    assert "[rank 0] I am 0\n" in ran.stdout
    assert "[rank 1] I am 1\n" in ran.stdout


def test_the_session_goes_on_after_any_end(run: Run) -> None:
    ran = run(
        "import os, signal\n"
        "@pytest.mark.parametrize('round', range(4))\n"
        "@pytest.mark.parametrize('how', ['kill', 'exit', 'raise', 'helper', 'pass'])\n"
        "@pytest.mark.world(2)\n"
        "def test_it(world, how, round):\n"
        "    if how == 'kill' and world.rank: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if how == 'exit' and world.rank: os._exit(3)\n"
        "    if how == 'helper' and world.rank: os.kill(os.getppid(), signal.SIGKILL)\n"
        "    assert how != 'raise' or world.rank == 0\n",
        "--tb=native",
    )
    assert "16 failed, 4 passed" in ran.stdout
    lost = "\nthe world was lost: the process that forks the ranks ended unexpectedly"
    assert ran.stdout.count(lost) == 4
    assert "During handling" not in ran.stdout
    assert "rank 1 of 2 failed:\nTraceback (most recent call last):" in ran.stdout
    assert "distcheck/testing" not in ran.stdout


def test_the_conformance_suite(tmp_path: Path) -> None:
    (tmp_path / "unweighted.py").write_text(
        "import torch.distributed as dist\n"
        "def mean_of_means(model, step):\n"
        "    for p in model.parameters():\n"
        "        dist.all_reduce(p.grad)\n"
        "        p.grad /= step.world_size\n"
    )
    strategies = ["allreduce", "unweighted.py:mean_of_means", "unweighted.py:mean_of_mean"]
    options = [word for name in strategies for word in ("--distcheck-strategy", name)]
    options += ["--distcheck-world", "2", "--distcheck-world", "3", "--distcheck-workload", "mlp"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "distcheck.conformance", "-v", "-rf",
         "-p", "no:cacheprovider", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    ended = Counter(
        (strategy, line.split()[1])
        for line in ran.stdout.splitlines()
        for strategy in strategies
        if f"[{strategy}-world" in line and "%]" in line
    )
    assert (ended["allreduce", "PASSED"], ended["allreduce", "SKIPPED"]) == (18, 2), ran.stdout
    assert not ended["allreduce", "FAILED"]
    assert ended[strategies[1], "FAILED"]
    failed = ran.stdout[ran.stdout.index("short test summary") :]
    assert "mean_of_means-world3-mlp" in failed
    assert "mean_of_means-world2-mlp-gradients" not in failed, "equal shards hide it"
    assert "gradients (R) fail: step 0" in ran.stdout
    assert ended[strategies[2], "FAILED"] == 20
    assert "unweighted.py has no object 'mean_of_mean'" in ran.stdout
    assert "_verified" not in ran.stdout, "a sentence, and no traceback of ours"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give --distcheck-strategy NAME"),
        (["-p", "no:distcheck"], "leave -p no:distcheck out"),
    ],
    ids=["alone", "without-the-plugin"],
)
def test_the_conformance_suite_needs_a_strategy(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "distcheck.conformance", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert ran.returncode != 0
    assert sentence in ran.stdout + ran.stderr
    assert "INTERNALERROR" not in ran.stdout
