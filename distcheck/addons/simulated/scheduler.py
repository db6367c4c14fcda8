"""Cooperative scheduler for rank threads: exactly one thread runs at a time.

A rank yields only when it blocks on other ranks (`block`), sleeps (`sleep`) or polls (`give_way`).
The rank that has been ready longest runs next (FIFO), so a run is deterministic. To try another
interleaving, a policy `choose` may select another rank, and may preempt a rank after a call
(`offer`). Simulated time advances only when no rank is ready: it then jumps to the next wake-up
time.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NoReturn

_ASKING_S = 0.001  # Heuristic: polling code often sleeps that long between two polls


class ThreadState(Enum):
    """State of a rank's thread."""

    READY = auto()
    WAITING = auto()
    ASLEEP = auto()
    OVER = auto()


class RankThread:
    """A rank's thread. When it runs again after a wait, the wait raises `error`, if that is set."""

    def __init__(self, rank: int) -> None:
        self.rank, self.state = rank, ThreadState.READY
        self.turn = threading.Lock()
        self.turn.acquire()
        self.waits_for: Any = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


class Scheduler:
    """Runs one function per rank.

    `switch(before, after)` is called between two ranks, when neither runs. `stuck()` is called when
    no rank can run; it wakes one, or never returns. `overslept(rank, seconds)` is called if time
    would advance by more than `most_sleep_s` at once; it never returns.
    """

    def __init__(
        self,
        size: int,
        *,
        switch: Callable[[int, int], None],
        stuck: Callable[[], None],
        overslept: Callable[[int, float], None],
        most_sleep_s: float,
        choose: Callable[[int, Sequence[int], int | None], int] | None = None,
    ) -> None:
        self.runners = [RankThread(rank) for rank in range(size)]
        self._switch, self._stuck = switch, stuck
        self._overslept, self._most_sleep_s = overslept, most_sleep_s
        self._ready, self._choose = deque(self.runners), choose
        self._asleep: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._own = threading.local()
        self.time_s = 0.0
        self.current = 0

    @property
    def rank(self) -> int | None:
        """Rank of the current thread; None for any other thread."""
        return getattr(self._own, "rank", None)

    def run(self, main: Callable[[int], None]) -> None:
        """Run `main(rank)` for every rank until all have returned."""
        for runner in self.runners:
            name = f"rank {runner.rank}"
            runner.thread = threading.Thread(
                target=self._live, args=(runner, main), name=name, daemon=True
            )
            runner.thread.start()
        first = self._take_next()
        if first.rank:
            self._switch(0, first.rank)  # the process starts with the state of rank 0
        self.current = first.rank
        first.turn.release()
        self._over.wait()
        for runner in self.runners:
            assert runner.thread is not None
            runner.thread.join()

    def block(self, waits_for: Any) -> None:
        """Yield until `wake` is called for this rank. Raises the error that is passed to `wake`."""
        own = self.runners[self.current]
        own.state, own.waits_for = ThreadState.WAITING, waits_for
        self._pass_on(own)
        own.waits_for = None
        if own.error is not None:
            error, own.error = own.error, None
            raise error

    def wake(self, rank: int, error: BaseException | None = None) -> None:
        runner = self.runners[rank]
        if runner.state is ThreadState.WAITING:
            runner.state, runner.error = ThreadState.READY, error
            self._ready.append(runner)

    def give_way(self) -> None:
        """Let all ready ranks run first, unless the policy continues with this rank. Each poll
        advances the time, so that a polling rank eventually reaches the next timed event.
        """
        own = self.runners[self.current]
        self.time_s += _ASKING_S
        while self._asleep and (not self._ready or self._asleep[0][0] <= self.time_s):
            self._let_time_pass()
        if self._ready:
            following = self._ready[0].rank
            if self._choose is not None:
                ranks = [*(runner.rank for runner in self._ready), own.rank]
                following = self._choose(following, ranks, own.rank)
            if following != own.rank:
                self._ready.append(own)
                self._pass_on(own, following)

    def offer(self) -> None:
        """Let the policy, if there is one, preempt this rank."""
        if self._choose is None or not self._ready:
            return
        own = self.runners[self.current]
        ranks = [own.rank, *(runner.rank for runner in self._ready)]
        chosen = self._choose(own.rank, ranks, None)
        if chosen != own.rank:
            self._ready.append(own)
            self._pass_on(own, chosen)

    def sleep(self, seconds: float) -> None:
        """Yield until the given number of simulated seconds has passed."""
        own = self.runners[self.current]
        own.state = ThreadState.ASLEEP
        heapq.heappush(self._asleep, (self.time_s + max(0.0, seconds), own.rank))
        self._pass_on(own)

    def freeze(self) -> NoReturn:
        """Stop this thread, and with it all ranks, until the process is ended."""
        threading.Event().wait()
        raise AssertionError("a frozen world went on")

    def _live(self, runner: RankThread, main: Callable[[int], None]) -> None:
        self._own.rank = runner.rank
        runner.turn.acquire()
        try:
            main(runner.rank)
        finally:
            runner.state = ThreadState.OVER
            if all(other.state is ThreadState.OVER for other in self.runners):
                self._over.set()
            else:
                self._pass_on(runner)

    def _take_next(self, chosen: int | None = None) -> RankThread:
        """Remove and return the thread that runs next: that of rank `chosen`, or the policy's
        choice.
        """
        usual = self._ready[0]
        if chosen is None and self._choose is not None:
            ranks = [runner.rank for runner in self._ready]
            chosen = self._choose(usual.rank, ranks, None)
        found = usual if chosen is None else self.runners[chosen]
        self._ready.remove(found)
        return found

    def _pass_on(self, own: RankThread, chosen: int | None = None) -> None:
        while not self._ready:
            if self._asleep:
                self._let_time_pass()
            else:
                self._stuck()
        following = self._take_next(chosen)
        if following is not own:
            self._switch(own.rank, following.rank)
            self.current = following.rank
            following.turn.release()
            if own.state is not ThreadState.OVER:
                own.turn.acquire()
        own.state = ThreadState.READY if own.state is not ThreadState.OVER else own.state

    def _let_time_pass(self) -> None:
        wakes_at, rank = self._asleep[0]
        if wakes_at - self.time_s > self._most_sleep_s:
            self._overslept(rank, wakes_at - self.time_s)
        wakes_at, rank = heapq.heappop(self._asleep)
        self.time_s = max(self.time_s, wakes_at)
        runner = self.runners[rank]
        runner.state = ThreadState.READY
        self._ready.append(runner)
