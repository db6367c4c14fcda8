"""A hang is told from a slow machine by what the ranks did meanwhile."""

import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from distcheck.judge.diagnosis.outcomes import explain as of_outcomes
from distcheck.worlds import linux, messages, root_cause
from distcheck.worlds.local.children import Child
from distcheck.worlds.stalls import StallWatch
from distcheck.worlds.world import World
from tests.waiting import wait_until


@dataclass(eq=False)
class Rank(Child):
    """A rank whose signs of life are said here."""

    busy: float = 0.0
    awake: bool = False
    news: float = float("inf")

    @property
    def busy_seconds(self) -> float:
        return self.busy

    @property
    def is_awake(self) -> bool:
        return self.awake

    @property
    def known_at(self) -> float:
        return self.news


def hung_at(watch: StallWatch, ranks: list[Rank], *, works: float = 0.0, until: float) -> float:
    """When it was said to have hung, looked at every tenth of a second from 0; else infinity."""
    for tick in range(1, round(until * 10) + 1):
        for rank in ranks:
            rank.busy += works * 0.1
        if watch.look(ranks, tick / 10):
            return tick / 10
    return float("inf")


def test_ranks_that_do_nothing_have_hung_at_the_deadline() -> None:
    assert hung_at(StallWatch(2.0, 0.0), [Rank(pid=1), Rank(pid=2)], until=3) == pytest.approx(
        2.1, abs=0.11
    )


@pytest.mark.parametrize(
    ("rank", "works"),
    [(Rank(pid=1), 0.5), (Rank(pid=1, awake=True), 0.0), (Rank(), 0.0)],
    ids=["runs", "is awake", "is not forked yet"],
)
def test_ranks_that_are_kept_busy_have_ten_times_as_long(rank: Rank, works: float) -> None:
    """The one that is there waits for the other."""
    found = hung_at(StallWatch(1.0, 0.0), [Rank(pid=2), rank], works=works, until=12)
    assert found == pytest.approx(10.1, abs=0.11)


def test_what_the_clock_wakes_in_many_ranks_is_not_work() -> None:
    """Each of eight runs for 1 % of the time, as gloo's threads may; together that is 8 %."""
    ranks = [Rank(pid=rank) for rank in range(1, 9)]
    assert hung_at(StallWatch(1.0, 0.0), ranks, works=0.01, until=12) < 1.3


def test_a_rank_that_could_not_be_forked_is_not_waited_for() -> None:
    ranks = [Rank(pid=2), Rank(spawn_error="no more processes", gone=True)]
    assert hung_at(StallWatch(1.0, 0.0), ranks, until=12) < 1.3


def test_progress_starts_the_clock_anew() -> None:
    watch, rank = StallWatch(1.0, 0.0), Rank(pid=1)
    assert not watch.look([rank], 0.1)
    assert hung_at(watch, [rank], until=0.8) == float("inf")
    rank.progress_count += 1
    assert not watch.look([rank], 0.9)
    assert not any(watch.look([rank], at) for at in (1.1, 1.3, 1.5, 1.7))
    assert any(watch.look([rank], at) for at in (1.8, 1.9, 2.0))


def test_time_in_which_nobody_looked_counts_for_half_a_second() -> None:
    watch, rank = StallWatch(1.0, 0.0), Rank(pid=1)
    assert not watch.look([rank], 0.1)
    assert not watch.look([rank], 60.0)
    assert watch.look([rank], 120.0)


def test_nothing_is_concluded_without_news() -> None:
    watch, rank = StallWatch(1.0, 0.0), Rank(pid=1)
    assert not watch.look([rank], 0.1)
    rank.news = 0.1
    assert hung_at(watch, [rank], until=30) == float("inf")


class Share:
    """Ranks of a world, of which nothing is asked but to note what they were told."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.children = dict(enumerate(ranks))
        self.told: list[str] = []

    def look(self) -> None:
        pass

    def ask(self) -> None:
        self.told.append("ask")

    def signal(self, child: Rank, number: int) -> None:
        self.told.append(f"{number} to {child.pid}")

    def release(self) -> None:
        self.told.append("release")


def test_what_a_failure_leaves_its_peers_is_time_that_somebody_saw() -> None:
    """0.7 s to notice it and say so themselves, of which a front that stood still takes none."""
    share = Share([Rank(pid=1), Rank(pid=2)])
    world = World([share], deadline_s=60)  # type: ignore[list-item]
    share.children[0].gone = True
    world.tick()
    time.sleep(0.8)
    world.tick()
    assert share.told == []
    time.sleep(0.3)
    world.tick()
    assert share.told == ["ask"]


def test_who_did_not_answer_was_not_killed_by_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that could not even say where it was, an out-of-memory killer would be suspected."""
    for name in ("_ASK_S", "_MOST_SHAKE_S"):
        monkeypatch.setattr(f"distcheck.worlds.world.{name}", 0.0)
    ranks = [Rank(pid=1), Rank(pid=2), Rank(pid=3)]
    share = Share(ranks)
    ranks[0].take(messages.Done(b""))
    ranks[1].gone, ranks[1].exit_signal = True, signal.SIGKILL
    world = World([share], deadline_s=60)  # type: ignore[list-item]
    while "release" not in share.told:
        world.tick()
    assert share.told == ["ask", "10 to 3", "9 to 3", "release"]
    ranks[2].gone, ranks[2].exit_signal = True, signal.SIGKILL
    for hung, name in ((False, "ended"), (True, "hung")):
        told = {o.rank: o for o in root_cause.rank_outcomes(ranks, hung=hung)}
        assert (told[1].outcome, told[2].outcome) == ("killed", name)
        assert "out-of-memory" in told[1].detail
        assert "did not respond to a request for its stack" in told[2].detail
        assert "out-of-memory" not in told[2].detail
    (found,) = of_outcomes([told[2]])
    assert found.evidence == "no progress until the deadline: rank 2 did not respond"
    assert found.suggestion == "check whether something stopped rank 2, or blocks it in the kernel"


SPINS = """
import pathlib, threading, time
pathlib.Path("/proc/self/comm").write_bytes(b"cut within \\xc3")
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
print(flush=True)
time.sleep(1000)
"""
SLEEPS = "import time; print(flush=True); time.sleep(1000)"
MAIN_SPINS = """
print(flush=True)
while True:
    pass
"""
# As gloo's thread that looks for messages: on a crowded machine it waits for a core.
RECEIVES = SPINS.replace(
    "    while",
    """    pathlib.Path("/proc/thread-self/comm").write_text("gloo_tcp_loop")
    print(flush=True)
    while""",
).replace("print(flush=True)\ntime", "time")


@pytest.mark.parametrize(("program", "awake"), [(SPINS, True), (SLEEPS, False), (RECEIVES, False)])
def test_who_runs_or_would_run_is_awake(program: str, awake: bool) -> None:
    """Its main thread sleeps in both cases."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=-1)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: linux.is_awake(process.pid) is awake)
        if awake:  # without a core, too
            with warnings.catch_warnings(record=True, action="always") as warned:
                assert all(linux.is_awake(process.pid) for _ in range(20))
            assert not warned, "the plugin looks from somebody's pytest, which may forbid them"
    finally:
        process.kill()
        process.communicate()
    assert not linux.is_awake(process.pid)


def test_a_rank_that_has_run_since_it_said_that_it_waits_is_awake() -> None:
    """The thread that would take it back may wait for a core itself."""
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=-1) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            child, ran_ns = Child(pid=process.pid), -1
            while ran_ns != linux.main_thread_run_ns(process.pid) or linux.is_awake(process.pid):
                ran_ns = linux.main_thread_run_ns(process.pid)
                time.sleep(0.05)
            for said, awake in ((ran_ns, False), (ran_ns - 1, True), (0, False)):
                child.take(messages.Blocked(ran_ns=said))
                assert child.is_awake is awake
        finally:
            process.kill()


def test_a_rank_that_has_said_that_it_waits_only_looks_whether_that_has_come() -> None:
    """It takes that back before it goes on: so its main thread may run meanwhile, as over MPI."""
    with subprocess.Popen([sys.executable, "-c", MAIN_SPINS], stdout=-1) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            child = Child(pid=process.pid)
            for said, looks in (
                (messages.Blocked(on=(0,)), True),
                (messages.Unblocked(), False),
                (messages.Blocked(over=True), False),
                (messages.Blocked(on=(0,), ran_ns=1), False),
            ):
                child.take(said)
                found = [child.is_awake for _ in range(20)]
                assert not any(found) if looks else any(found), said
        finally:
            process.kill()


@pytest.mark.parametrize("other", [RECEIVES, MAIN_SPINS])
def test_what_a_thread_of_the_clock_waits_for_is_not_work(other: str) -> None:
    """Two programs share one core: each has it for half the time, and waits for it otherwise."""
    core = min(os.sched_getaffinity(0))
    pair = [subprocess.Popen([sys.executable, "-c", p], stdout=-1) for p in (SPINS, other)]
    children = [Child(pid=one.pid) for one in pair]
    children[1].take(messages.Blocked(on=(0,)))
    try:
        for one in pair:
            assert one.stdout is not None
            one.stdout.readline()
            for task in Path(f"/proc/{one.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
        before = [one.busy_seconds for one in children]
        spins = receives = 0.0
        while receives < 0.1:  # CPU seconds, however long that takes on a crowded machine
            time.sleep(0.1)
            spins, receives = (
                one.busy_seconds - then for one, then in zip(children, before, strict=True)
            )
    finally:
        for one in pair:
            one.kill()
            one.communicate()
    assert receives < 0.75 * spins, "what any other thread waits for is work that it would do"
