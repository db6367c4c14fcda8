"""One world of ranks, which are started, supervised and ended together.

running     until every rank has reported, one has failed, or all have stalled
asking      the remaining ranks are asked for their stacks
shaking     ranks that did not respond are asked by a signal, which needs no Python lock
ending      ranks that have not reported are killed
over        every rank has exited, and its exit status is known
"""

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial

from distcheck.records import posted_calls
from distcheck.records.posted_calls import PostedCall
from distcheck.worlds import messages, root_cause
from distcheck.worlds.call_log import LoggedCall
from distcheck.worlds.local.children import Child
from distcheck.worlds.messages import Proven, printable
from distcheck.worlds.proofs import ProofWatch
from distcheck.worlds.root_cause import SIZES_DIFFER
from distcheck.worlds.shares import LauncherJob, Share
from distcheck.worlds.stalls import StallWatch, TimeBetweenLooks

# Signals that end a process after an invalid memory access, or when a library aborts.
_FATAL = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
Key = tuple[str, tuple[int, ...], int]  # of a collective: its group, the group's ranks, its number


def mismatch_of(cause: Child, children: Sequence[Child]) -> Proven | None:
    """Return the mismatch among the logged calls, if the first rank to fail failed in a call."""
    within = cause.raised is not None and cause.raised.within_call
    died = cause.exit_signal in _FATAL and (cause.was_within_call or SIZES_DIFFER in cause.output)
    if not (within or died):
        return None
    logs = _logs(children)
    what = _collectives_apart(logs) or _messages_apart(logs)
    return Proven("mismatch", printable(what)) if what else None


def or_earlier(proven: Proven, children: Sequence[Child]) -> Proven:
    """Return the given proof. For a deadlock, return an earlier mismatch instead, if there is one:
    some libraries complete mismatched calls, and later errors follow from it.
    """
    if proven.how == "mismatch":
        return proven
    what = _collectives_apart(_logs(children))
    return Proven("mismatch", printable(what)) if what else proven


def _logs(children: Sequence[Child]) -> dict[int, list[LoggedCall]]:
    world = len(children)
    return {
        rank: [logged for logged in child.called if _is_valid_call(logged, rank, world)]
        for rank, child in enumerate(children)
    }


def _is_valid_call(logged: LoggedCall, rank: int, world: int) -> bool:
    """Return True if a call names only existing ranks. Any code may have written the log."""
    call, ranks = logged.call, {*logged.ranks}
    named = {other for other in (call.root, call.peer) if other is not None}
    alone = len(ranks) == len(logged.ranks)
    return alone and ranks <= {*range(world)} and rank == call.rank in ranks and named <= ranks


def _collectives_apart(logs: Mapping[int, Sequence[LoggedCall]]) -> str:
    meetings: defaultdict[Key, dict[int, PostedCall]] = defaultdict(dict)
    for rank, calls_of_rank in logs.items():
        for logged in calls_of_rank:
            if not (call := logged.call).is_message:
                meetings[call.group, logged.ranks, call.number][rank] = call
    for group, ranks, number in sorted(meetings, key=lambda key: (key[2], key[0])):
        there = meetings[group, ranks, number]
        calls = list(there.values())
        one = next((call for call in calls if call.known), calls[0])
        differ = any(posted_calls.calls_differ(one, other) for other in calls)
        if differ or (one.kind == "all_to_all" and posted_calls.splits_disagree(there, ranks)):
            unknown = [rank for rank in ranks if rank not in there]
            return posted_calls.call_mismatch_in_words(number, calls, [], unknown)
    return ""


def _messages_apart(logs: Mapping[int, Sequence[LoggedCall]]) -> str:
    """Describe a send and a receive that do not match. Ranks that receive from any rank are
    skipped.
    """
    sent = {
        (logged.ranks, call.group, call.tag, call.number, call.rank, call.peer): call
        for calls in logs.values()
        for logged in calls
        if (call := logged.call).kind == "send"
    }
    for rank, calls in logs.items():
        received = [one for one in calls if one.call.kind == "recv"]
        if any(one.call.peer is None for one in received):
            continue
        for ranks, call in ((one.ranks, one.call) for one in received):
            assert call.peer is not None
            other = sent.get((ranks, call.group, call.tag, call.number, call.peer, rank))
            if other and (other.counts, other.dtype) != (call.counts, call.dtype):
                return posted_calls.message_mismatch_in_words(other, call)
    return ""


_GRACE_S = 0.7  # after a failure: time for the peers to fail and report as well
_BUSY_GRACE_S = 4.0  # additional time while one of them runs or is runnable
_ASK_S = 4.0  # for stacks to arrive on an overloaded machine; usually milliseconds
_SHAKE_S = 0.3  # for faulthandler to finish writing
_MOST_SHAKE_S = 8.0  # for a rank that is not scheduled, or reports over a network
_LOOK_EVERY_S = 0.1
_MOST_LEAVING_S = 30.0  # for ranks that may exit, until they are killed
# Heuristic, the default deadline: a rank may be stopped this long, even if a case has a shorter
# deadline, for example while a laptop is suspended or a person debugs.
_STOPPED_S = 30.0


class Phase(Enum):
    """Phase in the life of a world."""

    RUNNING = auto()
    ASKING = auto()
    SHAKING = auto()
    ENDING = auto()
    OVER = auto()


class World:
    """Processes that run one job together: the ranks of a world, or a single-process job."""

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        deadline_s: float,
        on_progress: Callable[[int, messages.Progress], None] | None = None,
        job: LauncherJob | None = None,
        stopped_s: float | None = None,  # deadline of stopped ranks; `deadline_s` by default
    ) -> None:
        self._shares, self._job = shares, job
        self._phase = Phase.RUNNING
        self._failed_at: float | None = None
        self._busy_grace_s = 0.0  # part of the time since then
        self._last_look = self._stopped_s = 0.0
        self.hung = False
        self._phase_since = self._now = 0.0  # seconds during which the world was observed
        self.begun = time.monotonic()
        self._ticks = TimeBetweenLooks(self.begun)
        self._share_of = {rank: share for share in shares for rank in share.children}
        self.children = [self._share_of[rank].children[rank] for rank in sorted(self._share_of)]
        if on_progress is not None:
            for rank, child in enumerate(self.children):
                child.on_progress = partial(on_progress, rank)
        self._most_stopped_s = max(stopped_s or deadline_s, _STOPPED_S)
        self._watch = StallWatch(deadline_s, time.monotonic())
        self._proofs = ProofWatch()

    @property
    def over(self) -> bool:
        return self._phase is Phase.OVER

    @property
    def succeeded(self) -> bool:
        """True if every rank finished its job and exited normally."""
        return self.over and all(
            root_cause.has_finished(child, hung=self.hung) for child in self.children
        )

    @property
    def results(self) -> list[bytes]:
        """Result of each rank's job; complete only if all ranks succeeded."""
        return [child.done.payload for child in self.children if child.done is not None]

    def tick(self) -> None:
        """Advance to the next phase if that is due. Call it after every `pump`."""
        before = self._now
        self._now = now = before + self._ticks.since_last(time.monotonic())
        for share in self._shares:
            share.look()
        if self._phase is Phase.RUNNING:
            self._tick_running(now, now - before)
        elif self._phase is Phase.ASKING:
            self._tick_asking(now)
        elif self._phase is Phase.SHAKING and self._heard_enough(now - self._phase_since):
            self._kill()
        if self._phase is Phase.ENDING:
            if all(child.gone for child in self.children):
                self._conclude()
                self._enter_phase(Phase.OVER, now)
            elif now - self._phase_since >= _MOST_LEAVING_S:
                self._signal([c for c in self.children if not c.gone], signal.SIGKILL)
                self._phase_since = now

    def kill(self) -> None:
        if not self.over:
            self._kill()

    def begin_again(self, deadline_s: float) -> None:
        """Restart the deadline, for ranks that were idle intentionally."""
        self._watch = StallWatch(deadline_s, time.monotonic())

    def interrupt(self) -> None:
        """End the world as if it had hung now; ranks are first asked for their stacks."""
        if self._phase is Phase.RUNNING:
            self.hung = True
            self._ask(self._now)

    def close(self) -> None:
        """Close descriptors. The world is over, or was ended as far as possible."""
        for share in self._shares:
            share.close()
        if self._job is not None:
            self._job.close()
            self._job = None

    def _tick_running(self, now: float, elapsed: float) -> None:
        children = self.children
        if any(child.proven is not None for child in children):  # it reported so itself
            self.hung = True
            self._kill()
            return
        if all(child.done is not None and not child.gone for child in children):
            self._release_all()
            self._enter_phase(Phase.ENDING, now)
            return
        if any(child.raised is not None or child.gone for child in children):
            if self._failed_at is None:
                self._failed_at = now
            waiting = [c for c in children if not c.gone and c.raised is None and c.done is None]
            if self._busy_grace_s < _BUSY_GRACE_S and any(child.is_awake for child in waiting):
                self._busy_grace_s += elapsed
            if not waiting or now - self._failed_at - self._busy_grace_s >= _GRACE_S:
                self._ask(now)
            return
        if now - self._last_look >= _LOOK_EVERY_S:
            looked, self._last_look = self._last_look, now
            self.hung = self._has_hung(now - looked)
            if self.hung:
                self._ask(now)

    def _has_hung(self, elapsed: float) -> bool:
        """Return True if the ranks cannot proceed: they were stopped for too long, are proven to be
        blocked, or have exceeded the deadline. While one rank is stopped, the state of the others
        shows nothing about the code.
        """
        waited_for = [c for c in self.children if c.done is None]
        if any(child.is_stopped for child in waited_for):
            self._stopped_s += elapsed
            return self._stopped_s >= self._most_stopped_s
        self._stopped_s = 0.0
        proven = self._proofs.look(self.children, time.monotonic())
        if proven is not None:
            proven = or_earlier(proven, self.children)
            for child in self.children:
                child.proven = proven
        return proven is not None or self._watch.look(waited_for, time.monotonic())

    def _ask(self, now: float) -> None:
        for child in self._unreported():
            child.stopped = child.is_stopped
        for share in self._shares:
            share.ask()
        self._enter_phase(Phase.ASKING, now)

    def _tick_asking(self, now: float) -> None:
        """Send SIGUSR1 to the ranks that did not answer. The signal is the second attempt, because
        faulthandler may crash when it reads a thread that is running Python, as in a rank that is
        about to answer.
        """
        silent = self._silent()
        if not silent:
            self._kill()
        elif now - self._phase_since >= _ASK_S:
            for child in silent:
                child.shaken = True
            self._signal(silent, signal.SIGUSR1)
            self._enter_phase(Phase.SHAKING, now)

    def _heard_enough(self, waited_s: float) -> bool:
        """Return True if every rank has answered, or will not answer: a rank that holds the GIL in
        C code answers only through faulthandler.
        """
        silent = self._silent()
        if not silent or waited_s >= _MOST_SHAKE_S:
            return True
        return waited_s >= _SHAKE_S and all(child.low_level_stacks for child in silent)

    def _kill(self) -> None:
        unreported = self._unreported()
        for child in unreported:
            child.cut_short = True
            child.ended = self._phase is Phase.SHAKING
        self._signal(unreported, signal.SIGKILL)
        self._release_all()
        self._enter_phase(Phase.ENDING, self._now)

    def _conclude(self) -> None:
        if self.hung or all(root_cause.has_finished(child, hung=False) for child in self.children):
            return
        cause = root_cause.first_cause(self.children, hung=False)
        found = mismatch_of(cause, self.children)
        for child in self.children:
            child.proven = child.proven or found

    def _unreported(self) -> list[Child]:
        return [c for c in self.children if not c.gone and c.done is None and c.raised is None]

    def _silent(self) -> list[Child]:
        return [c for c in self._unreported() if c.stacks is None and not c.stopped]

    def _signal(self, children: Sequence[Child], number: int) -> None:
        for rank, share in self._share_of.items():
            child = share.children[rank]
            if any(child is one for one in children):
                share.signal(child, number)

    def _release_all(self) -> None:
        for child in self.children:
            child.released = not child.gone
        for share in self._shares:
            share.release()

    def _enter_phase(self, phase: Phase, now: float) -> None:
        self._phase, self._phase_since = phase, now
