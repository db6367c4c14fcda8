"""Ranks come to exist, are watched, and end; nothing is left behind."""

import faulthandler
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from distcheck.records import Outcome
from distcheck.worlds import root_cause
from distcheck.worlds.launch import run_until_over, start_job
from distcheck.worlds.local.child import _imported_since
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.helper_process import ForkedHelper
from distcheck.worlds.pool import Pool
from distcheck.worlds.world import World
from tests.world.command import hear_interrupts
from tests.world.launching import hang, lone, run, start

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_meet(pool: Pool, world: int) -> None:
    outcomes, results = run(pool, "everything_fine", world)
    assert [o.outcome for o in outcomes] == ["finished"] * world
    facts = [msgspec.msgpack.decode(result) for result in results]
    assert {f["sum"] for f in facts} == {float(sum(range(world)))}
    assert {f["threads"] for f in facts} == {1}
    assert [f["environment"]["RANK"] for f in facts] == [str(r) for r in range(world)]
    assert {f["environment"]["WORLD_SIZE"] for f in facts} == {str(world)}
    assert {f["ifname"] for f in facts} == {"lo"}
    assert len({f["parent"] for f in facts}) == 1, "all forked from the helper"


def test_what_children_needed_of_distcheck_is_inherited_and_nothing_of_anybody_elses() -> None:
    pool = Pool()
    names = ["distcheck.workloads.mlp", "tests.correct", "pyclbr"]
    inherited = []
    try:
        for _ in range(2):
            payload = msgspec.msgpack.encode(names)
            world = start_job(pool, lone("imports"), payload, deadline_s=120.0)
            while not world.over:
                pool.pump(0.5)
                world.tick()
            inherited.append(msgspec.msgpack.decode(world.results[0]))
            world.close()
    finally:
        pool.close()
    assert inherited == [[], ["distcheck.workloads.mlp"]]


@pytest.mark.parametrize("culprit", [0, 2])
def test_who_raised_comes_first_and_victims_after(pool: Pool, culprit: int) -> None:
    outcomes, _ = run(pool, "raises", 4, culprit=culprit)
    first = outcomes[0]
    assert (first.rank, first.outcome) == (culprit, "raised")
    assert "ValueError: rank's own error" in first.detail
    assert first.detail.startswith("step 1 (sync)\n")
    assert all(
        "secondary failure (peer exited)" in o.detail for o in outcomes[1:] if o.outcome == "raised"
    )
    assert {o.outcome for o in outcomes[1:]} <= {"raised", "ended", "finished"}


def test_ranks_that_are_still_at_work_are_heard_after_the_first_failure(pool: Pool) -> None:
    outcomes, _ = run(pool, "raises_late", 3, culprit=1)
    assert [outcome.outcome for outcome in outcomes] == ["raised"] * 3, outcomes
    assert all(f"rank {o.rank}'s own error" in o.detail for o in outcomes)


@pytest.mark.parametrize("code", [0, 7])
def test_an_exit_is_never_taken_for_success(pool: Pool, code: int) -> None:
    outcomes, _ = run(pool, "exits", 3, culprit=1, code=code)
    assert (outcomes[0].rank, outcomes[0].outcome) == (1, "exited")
    assert f"exited with code {code} without an error message" in outcomes[0].detail
    assert "in exits\n    os._exit(about" in outcomes[0].detail
    assert_lost(outcomes[1:], "exits")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "out-of-memory"),
        (signal.SIGSEGV, "string_at"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGABRT, "Fatal Python error: Aborted"),
    ],
)
def test_signals_are_named(pool: Pool, number: signal.Signals, said: str) -> None:
    outcomes, _ = run(pool, "killed", 3, culprit=2, signal=int(number))
    assert (outcomes[0].rank, outcomes[0].outcome) == (2, "killed")
    assert f"killed by {number.name}" in outcomes[0].detail
    assert said in outcomes[0].detail
    assert_lost(outcomes[1:], "killed")


def assert_lost(victims: list[Outcome], job: str) -> None:
    """The dead tell nothing: what the others were in when they lost it is what there is."""
    for victim in victims:
        assert victim.outcome in ("raised", "ended")
        first, _, rest = victim.detail.partition("\n")
        lost = (
            r"; secondary failure \(peer exited\) at /.*/jobs\.py:\d+ \(last collective: .* "
            r"\[1\], number 1\)$"
        )
        assert victim.outcome == "ended" or re.search(lost, first)
        assert f"in {job}" in rest
        assert "last collective: all_reduce of [1], number 1" in rest


def test_a_hang_is_told_with_every_stack_and_the_last_collective(pool: Pool) -> None:
    outcomes = hang(pool, "hangs", 3, culprit=1)[1]
    assert [o.outcome for o in outcomes] == ["hung"] * 3
    assert outcomes[0].rank == 1, "the rank that is in no collective comes first"
    assert "time.sleep(1000)" in outcomes[0].detail
    for waiting in outcomes[1:]:
        assert waiting.detail.startswith(
            "step 2 (sync)\nlast collective: all_reduce of [5], number 1"
        )
        assert "not finished" in waiting.detail
        assert "jobs.py" in waiting.detail


def test_slow_kills_report_the_same_hang(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, where a rank's collective fails before its own turn comes."""
    signal_all = World._signal

    def one_by_one(self: World, children: Sequence[Child], number: int) -> None:
        for child in children:
            signal_all(self, [child], number)
            time.sleep(0.3)

    monkeypatch.setattr(World, "_signal", one_by_one)
    outcomes = hang(pool, "hangs", 3, culprit=1)[1]
    assert [(o.rank, o.outcome) for o in outcomes] == [(1, "hung"), (0, "hung"), (2, "hung")]
    assert all("not finished" in waiting.detail for waiting in outcomes[1:])


def test_only_a_rank_that_cannot_answer_is_shaken(pool: Pool) -> None:
    """What faulthandler reads while Python runs can be a segmentation fault."""
    assert_shaken(*hang(pool, "holds_the_lock", 2))


def test_whoever_else_listens_to_that_signal_takes_no_stacks_away() -> None:
    """A pytest process that asks faulthandler for the same, of which the helper is a fork."""
    faulthandler.register(signal.SIGUSR1)
    own = Pool(ForkedHelper())
    try:
        assert_shaken(*hang(own, "holds_the_lock", 2))
    finally:
        own.close()
        faulthandler.unregister(signal.SIGUSR1)


def assert_shaken(ranks: World, outcomes: list[Outcome]) -> None:
    assert [child.shaken for child in ranks.children] == [False, True]
    there, stuck = sorted(outcomes, key=lambda o: o.rank)
    assert (there.outcome, stuck.outcome) == ("hung", "hung")
    assert "dist.barrier()" in there.detail
    assert "in holds_the_lock" in stuck.detail


def test_a_question_that_comes_too_early_ends_nobody(pool: Pool) -> None:
    """SIGUSR1, to a rank that has just been forked, and to the helper itself."""
    helpers = set()
    for _ in range(2):
        ranks = start(pool, "everything_fine", 2)
        ranks._signal(ranks.children[-1:], signal.SIGUSR1)
        run_until_over(pool, ranks)
        assert ranks.succeeded, root_cause.rank_outcomes(ranks.children, hung=ranks.hung)
        (helper,) = {msgspec.msgpack.decode(result)["parent"] for result in ranks.results}
        ranks.close()
        os.kill(helper, signal.SIGUSR1)
        helpers.add(helper)
    assert len(helpers) == 1


def test_a_hang_that_ends_because_it_was_looked_at_was_one(pool: Pool) -> None:
    ranks, outcomes = hang(pool, "wakes_when_shaken", 2)
    assert not ranks.succeeded
    assert {o.rank: o.outcome for o in outcomes} == {0: "finished", 1: "hung"}


def test_a_world_that_computes_has_not_hung(pool: Pool) -> None:
    outcomes, _ = run(pool, "works_hard", 2, deadline_s=2.0)
    assert {o.outcome for o in outcomes} == {"finished"}


def test_a_grandchild_does_not_survive(pool: Pool) -> None:
    said: list[bytes] = []
    ranks = start(pool, "leaves_a_grandchild", 2)
    for child in ranks.children:
        child.on_said = said.append
    while not ranks.over:
        pool.pump(0.05)
        ranks.tick()
    ranks.close()
    _wait_until(lambda: not psutil.pid_exists(int(said[0])) or _is_zombie(int(said[0])))


def _sleepers(seconds: str) -> list[psutil.Process]:
    every = psutil.process_iter(["cmdline"])
    return [p for p in every if f"sleep {seconds}" in " ".join(p.info["cmdline"] or ())]


def test_a_chain_of_processes_does_not_survive() -> None:
    """Killing one makes orphans of those below it, again and again."""
    seconds = f"7771.{os.getpid()}"  # on this machine this test's alone
    own = Pool()
    run(own, "leaves_a_chain", 2, seconds=seconds, stays=False)
    _wait_until(lambda: not _sleepers(seconds))
    ranks = start(own, "leaves_a_chain", 2, seconds=seconds, stays=True)

    def seen() -> bool:
        own.pump(0.05)
        ranks.tick()
        return bool(_sleepers(seconds))

    _wait_until(seen, 60)
    own.close()
    assert not _sleepers(seconds)


def test_a_rank_that_leaves_before_it_may_has_not_finished(pool: Pool, tmp_path: Path) -> None:
    heard, noticed = tmp_path / "heard", tmp_path / "noticed"
    ranks = start(pool, "leaves_early", 2, heard=str(heard), noticed=str(noticed))
    leaves = ranks.children[1]
    while not ranks.over:
        pool.pump(0.05)
        if leaves.done is not None:
            heard.touch()
        if leaves.gone:
            noticed.touch()
            while ranks.children[0].done is None:
                pool.pump(0.05)
        ranks.tick()
    outcomes = root_cause.rank_outcomes(ranks.children, hung=ranks.hung)
    ranks.close()
    assert [(o.rank, o.outcome) for o in outcomes] == [(1, "exited"), (0, "finished")]
    assert "exited with code 0" in outcomes[0].detail


def test_output_is_kept_to_its_end(pool: Pool) -> None:
    outcomes, _ = run(pool, "chatters", 2)
    assert outcomes[0].rank == 1
    assert "rank 1 line 49999" in outcomes[0].detail
    assert "its output (last 20 lines):" in outcomes[0].detail
    assert len(outcomes[0].detail) < 10_000


def test_many_worlds_leave_nothing_open(pool: Pool) -> None:
    run(pool, "everything_fine", 3)
    gc.collect()  # what earlier tests left in cycles, files among it
    me = psutil.Process()
    before, shared = (me.num_fds(), len(me.children(recursive=True))), _shared_memory()
    for _ in range(25):
        run(pool, "everything_fine", 3)
        run(pool, "raises", 2, culprit=1)
    _wait_until(lambda: len(me.children(recursive=True)) <= before[1])
    assert (me.num_fds(), len(me.children(recursive=True))) == before
    # The whole machine shares it: what others made there meanwhile is theirs to remove.
    made = _shared_memory() - shared
    _wait_until(lambda: not made & _shared_memory(), 60)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,  # the others end a front in good order, which test_ends.py holds
        pytest.param(signal.SIGTERM, marks=pytest.mark.sweep),
        pytest.param(signal.SIGINT, marks=pytest.mark.sweep),
    ],
)
def test_everything_dies_with_the_front(number: signal.Signals, tmp_path: Path) -> None:
    """Processes, and the folders that these were using."""
    for name in ("temporary", "other"):
        (tmp_path / name).mkdir()
    other = os.fsencode(tmp_path / "other")
    program = (
        "from distcheck.worlds.pool import Pool\n"
        "from distcheck.worlds.launch import start_job\n"
        "pool = Pool()\n"
        "from tests.world.launching import lone\n"
        f"jobs = [start_job(pool, lone('sleeps_with_folders'), {other!r}, deadline_s=60)"
        " for _ in range(3)]\n"
        "while not all(j.children[0].progress for j in jobs): pool.pump(0.1)\n"
        "print('asleep', flush=True)\n"
        "while True: pool.pump(1)\n"
    )
    front = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, preexec_fn=hear_interrupts,
    )  # fmt: skip
    assert front.stdout is not None
    assert front.stdout.readline() == b"asleep\n"
    assert len(list(tmp_path.glob("*/*/within/file"))) == 6
    family = psutil.Process(front.pid).children(recursive=True)
    assert len(family) == 4, "the helper and three jobs"
    front.send_signal(number)
    front.wait()
    _wait_until(lambda: not any(p.is_running() and not _is_zombie(p.pid) for p in family))
    assert not [path for path in tmp_path.glob("*/*") if "torchinductor" not in path.name]


def test_a_pool_says_when_its_helper_is_gone(tmp_path: Path) -> None:
    from distcheck.errors import HelperError

    before = psutil.Process().children()
    own = Pool()
    own.wait_ready()
    (helper,) = set(psutil.Process().children()) - set(before)
    job = start_job(own, lone("sleeps_alone"), b"", deadline_s=60)
    helper.kill()
    helper.wait()
    assert not own.usable

    def wait() -> None:
        for _ in range(100):
            own.pump(0.1)
            job.tick()

    with pytest.raises(HelperError, match="ended unexpectedly"):
        wait()
    own.close()


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _shared_memory() -> set[str]:
    """Without the folders of MPI jobs, of which there are none here."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("distcheck-mpi-")}


def _wait_until(condition: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_only_what_is_new_is_said_to_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    before = len(sys.modules)
    assert _imported_since(before) == []
    here = sys.modules[__name__]
    sys.modules |= {"distcheck.first": here, "somebodys": here, "distcheck.second": here}
    assert _imported_since(before) == ["distcheck.first", "distcheck.second"]
    del sys.modules[next(iter(sys.modules))]
    assert _imported_since(before) == ["distcheck.second"]  # fewer, and never one that was there


def test_a_thread_may_import_during_the_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To know less costs the next child a moment; to fail would cost this one its world."""

    class Growing(dict[str, object]):
        def __reversed__(self) -> Iterator[str]:  # type: ignore[override]
            raise RuntimeError("dictionary changed size during iteration")

    before = len(sys.modules)
    now = {**sys.modules, "distcheck.new": sys}
    monkeypatch.setattr(sys, "modules", now)
    assert _imported_since(before) == ["distcheck.new"]
    monkeypatch.setattr(sys, "modules", Growing(now))
    assert _imported_since(before) == []
