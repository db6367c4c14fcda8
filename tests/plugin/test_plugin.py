"""The plugin as a guest in somebody's pytest: what it costs, refuses, and leaves behind."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.optional import needs
from tests.world import warm

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_it_is_inert_until_it_is_used(run: Run) -> None:
    text = "import sys\ndef test_nothing(): assert 'torch' not in sys.modules\n"
    ran = run(text, "-W", "error", new=True)
    assert ran.returncode == 0, ran.stdout


def test_without_the_plugin_the_marker_is_unknown(run: Run) -> None:
    text = "@pytest.mark.world(2)\ndef test_it(world): pass\n"
    ran = run(text, "-p", "no:distcheck", "--strict-markers")
    assert ran.returncode == 2
    assert "'world' not found in `markers`" in ran.stdout


BAD_MARKERS = {
    "world()": "needs the number of ranks",
    "world(4)\n@pytest.mark.world(5)": "several times, as world(5) and world(4); remove",
    "world(0)": "was given the size 0; it takes 1 to 256 ranks",
    "world('4')": "was given the size '4'",
    "world([])": "was given an empty list of sizes: nothing would run",
    "world(2, 3)": "takes one size or a list of sizes",
    "world(2, backend='simulated:heap')": "unknown order 'heap' of backend simulated",
    "world(2, backend='simulated', reuse=True)": "was given reuse with backend='simulated', where",
    "world(2, schedules=5)": "was given schedules, which needs backend='simulated'",
    "world(2, backend='simulated', schedules=-1)": "schedules -1 is out of range",
    "world(2, backend='simulated', schedule='x')": "schedule 'x' is not a schedule",
    "world(2, color='red')": "takes no color",
    "world(2, deadline_s=0)": "was given deadline_s=0; it takes a number of seconds above 0",
    "world(2, device='tpu')": "was given device='tpu'; it takes 'cpu' or 'cuda'",
    "world(2, reuse=1)": "was given reuse=1; it takes a bool",
}


@needs("simulated")
def test_a_bad_marker_gets_a_sentence(run: Run, tmp_path: Path) -> None:
    """Each in a file of its own, since a file that cannot be collected ends there."""
    for number, marker in enumerate(BAD_MARKERS):
        text = f"import pytest\n@pytest.mark.{marker}\ndef test_bad(world): pass\n"
        (tmp_path / f"test_bad_{number}.py").write_text(text)
    ran = run("def test_good(): pass\n", "--continue-on-collection-errors")
    assert ran.returncode != 0
    assert re.search(r"^=+ 1 passed, 15 errors in ", ran.stdout, re.M), ran.stdout
    for number, sentence in enumerate(BAD_MARKERS.values()):
        _, name, rest = ran.stdout.partition(f" test_bad_{number}.py ")
        assert name, ran.stdout
        assert sentence in rest.partition("\n____")[0]


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
@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.world(3))])
def test_marked_twice(world, n): assert n == 1

@pytest.mark.world(2)
def test_marked_again(world): pass

class TestBase:
    pytestmark = pytest.mark.world(1)
    size = 1

    def test_size(self, world): assert world.size == self.size

class TestOfMore(TestBase):
    pytestmark = pytest.mark.world(3)
    size = 3

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
        "        if item.name != 'test_marked_again': continue\n"
        "        item.add_marker(pytest.mark.world(8, seed=1))\n"
    )
    ran = run(LATE, "-rA", "-p", "no:capture")  # which takes the option along
    assert "7 passed, 5 errors" in ran.stdout, ran.stdout
    for name in ("fixture[world2]", "fixture[world3]", "parameter[world2-5]"):
        assert f"PASSED test_it.py::test_{name}\n" in ran.stdout
    assert ran.stdout.count("\nthe marker `world` was given the sizes [2, 3] by add_marker or") == 2
    several = "the marker `world` was given several times, as world(2) and "
    assert f"\n{several}world(3); remove all but one" in ran.stdout
    assert f"\n{several}world(8, seed=1); remove all but one" in ran.stdout
    assert "\ntest_it: a test in a world is a plain function, or a method of" in ran.stdout
    assert "testing/plugin.py" not in ran.stdout
    assert "During handling" not in ran.stdout


UNLIKE = """
import uuid, warnings

def fail(world, first, second):
    world.barrier()
    raise [first, second][world.rank]

@pytest.mark.xfail(raises=NotImplementedError)
@pytest.mark.world(2)
def test_unlike(world): fail(world, NotImplementedError("not yet"), AssertionError("wrong"))

@pytest.mark.xfail(raises=LookupError)
@pytest.mark.world(2)
def test_akin(world): fail(world, KeyError("k"), IndexError("i"))

@pytest.mark.world(2)
def test_warns_by_its_own_filters(world):
    warnings.simplefilter("once")
    warnings.warn("let through")

@pytest.mark.world(1)
def test_records(world, record_property): record_property("id", uuid.uuid4().int | 1 << 100)
"""


def test_what_one_rank_expects_hides_no_other_rank(run: Run) -> None:
    """Also: under -W error a test's own filters hold, and whatever is recorded arrives."""
    ran = run(UNLIKE, "-rfx", "-W", "error")
    assert "1 failed, 2 passed, 1 xfailed" in ran.stdout, ran.stdout
    assert "FAILED test_it.py::test_unlike" in ran.stdout
    assert "NotImplementedError: not yet" in ran.stdout
    assert "AssertionError: wrong" in ran.stdout
    assert "XFAIL test_it.py::test_akin" in ran.stdout


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
    assert ran.stdout.count("PytestUnraisableExceptionWarning: Exception ignored ") == 2
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
    assert "--trace is not supported: a rank has no terminal for a debugger" in ran.stdout


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


def test_a_stopped_helper_does_not_stop_the_session(run: Run) -> None:
    ran = run(
        "import os, signal\n"
        "from distcheck.worlds.local import forking\n"
        "forking._STOPPED_S = 2.0\n"
        "@pytest.mark.world(2)\n"
        "def test_fresh(world):\n"
        "    if world.rank: os.kill(os.getppid(), signal.SIGSTOP)\n"
        "@pytest.mark.world(2, reuse=True)\n"
        "def test_kept(world):\n"
        "    if world.rank: os.kill(os.getppid(), signal.SIGSTOP)\n"
        "    world.gather(1)\n"
        "@pytest.mark.world(2, reuse=True)\n"
        "def test_after(world): world.gather(1)\n",
        "--tb=native",
    )
    assert re.search(r"[12] failed, [12] passed", ran.stdout), ran.stdout
    lost = "\nthe world was lost: the process that forks the ranks does not respond: it was stopped"
    assert lost in ran.stdout
    assert "PASSED" not in ran.stdout.partition("test_after")[0]


@pytest.mark.sweep
def test_the_conformance_suite_sees_the_outputs_of_a_layout(tmp_path: Path) -> None:
    mutant = "distcheck_mutants.divided:ReturnsLogitsWithoutTheirMaximum"
    ran = warm.run(
        "--pyargs", "distcheck.testing.conformance", "-v", "-p", "no:cacheprovider",
        "--distcheck-strategy", mutant, "--distcheck-world=2", "--distcheck-workload",
        "distcheck_mutants.small:Small", cwd=tmp_path, program="pytest",
    )  # fmt: skip
    failed = [line for line in ran.stdout.splitlines() if "FAILED" in line and "%]" in line]
    assert len(failed) == 1, ran.stdout
    assert "Small-loss]" in failed[0]
    assert "outputs (full batch float32) fail" in ran.stdout


@pytest.mark.parametrize("worlds", [[3], pytest.param([2, 3], marks=pytest.mark.sweep)], ids=str)
def test_the_conformance_suite(tmp_path: Path, worlds: list[int]) -> None:
    (tmp_path / "unweighted.py").write_text(
        "import torch.distributed as dist\n"
        "def mean_of_means(model, step):\n"
        "    for p in model.parameters():\n"
        "        dist.all_reduce(p.grad)\n"
        "        p.grad /= step.world_size\n"
    )
    strategies = ["allreduce", "unweighted.py:mean_of_means", "unweighted.py:mean_of_mean"]
    options = [word for name in strategies for word in ("--distcheck-strategy", name)]
    options += [f"--distcheck-world={world}" for world in worlds]
    options += ["--distcheck-workload", "mlp"]
    words = ("--pyargs", "distcheck.testing.conformance", "-v", "-rf", "-p", "no:cacheprovider")
    ran = warm.run(*words, *options, cwd=tmp_path, program="pytest")
    ended = Counter(
        (strategy, line.split()[1])
        for line in ran.stdout.splitlines()
        for strategy in strategies
        if f"[{strategy}-world" in line and "%]" in line
    )
    passed, skipped = ended["allreduce", "PASSED"], ended["allreduce", "SKIPPED"]
    assert (passed, skipped) == (9 * len(worlds), len(worlds)), ran.stdout
    assert not ended["allreduce", "FAILED"]
    assert ended[strategies[1], "FAILED"]
    failed = ran.stdout[ran.stdout.index("short test summary") :]
    assert "mean_of_means-world3-mlp" in failed
    assert "mean_of_means-world2-mlp-gradients" not in failed, "equal shards hide it"
    assert "gradients (rounding) fail: step 0" in ran.stdout
    assert ended[strategies[2], "FAILED"] == 10 * len(worlds)
    assert "unweighted.py has no object 'mean_of_mean'" in ran.stdout
    assert "_verified" not in ran.stdout, "a sentence, and no traceback of ours"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [([], "pass --distcheck-strategy NAME"), (["-p", "no:distcheck"], "remove -p no:distcheck")],
    ids=["alone", "without-the-plugin"],
)
def test_conformance_needs_a_strategy(tmp_path: Path, options: list[str], sentence: str) -> None:
    words = ("--pyargs", "distcheck.testing.conformance", *options)
    ran = warm.run(*words, cwd=tmp_path, program="pytest")
    assert ran.returncode != 0
    assert sentence in ran.stdout + ran.stderr
    assert "INTERNALERROR" not in ran.stdout
