"""How a rank ended, told from what is known of it."""

import os
import signal
from typing import Any

import pytest

from distcheck.judge.diagnosis.outcomes import explain
from distcheck.records import Collective, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.worlds import messages, root_cause
from distcheck.worlds.local.children import Child
from distcheck.worlds.remote.coordinator import RemoteChild

_FRAMES = """  File "/x/mine.py", line 8, in sync
    mean(model)
  File "/x/mean.py", line 3, in mean
    dist.barrier()
  File "/y/torch/distributed/c10d_logger.py", line 9, in wrapper
    return func()
RuntimeError: Connection reset by peer
"""


def _call(name: str, number: int, shapes: str = "", **about: Any) -> Collective:
    return Collective(name=name, number=number, shapes=shapes, **about)


@pytest.mark.parametrize(
    ("collective", "said"),
    [
        (_call("barrier", 2, finished=False, place="/x/mean.py:3"), "barrier, number 2"),
        (_call("barrier", 1, place="/x/mine.py:5"), "barrier, number 1 at /x/mine.py:5"),
        (None, ""),
    ],
)
def test_a_victim_names_its_last_place(collective: Collective | None, said: str) -> None:
    child = RemoteChild(gone=True, exit_code=1)
    child.take(messages.Raised("RuntimeError", "Connection reset", _FRAMES, 1.0, None, collective))
    first, *_ = root_cause.rank_outcomes([child], hung=False)[0].detail.splitlines()
    last = f" (last collective: {said})" if said else ""
    assert first == f"before the first step; secondary failure (peer exited) at /x/mean.py:3{last}"


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("TimeoutExpired", False), ("DistBackendError", True), ("RuntimeError", True)],
)
def test_a_timeout_of_ones_own_is_no_lost_peer(kind: str, lost: bool) -> None:
    child = RemoteChild(gone=True, exit_code=1)
    child.take(messages.Raised(kind, "it timed out after 3 seconds", _FRAMES, 1.0, None))
    assert root_cause.is_secondary(child) == lost


_SAID = 'Current thread 0x1 (most recent call first):\n  File "mine.py", line 3 in sync\n'


@pytest.mark.parametrize("after", ["", "\n\nExtension modules: mine (total: 1)"])
def test_the_c_frames_of_python_3_14_are_left_out(after: str) -> None:
    child = Child()
    child.open_pipes()
    frames = (
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/x/python3.14", at _Py_DumpStack+0x36 [0x6bdff6]\n'
        "  <truncated rest of calls>"
    )
    os.pwrite(
        child._stacks_fd, f"Fatal Python error: Aborted\n\n{_SAID}\n{frames}{after}".encode(), 0
    )
    assert child.low_level_stacks == f"Fatal Python error: Aborted\n\n{_SAID.rstrip()}{after}"


_LOST = messages.Raised("RuntimeError", "Connection reset by peer", _FRAMES, 1.0, None)
_ANSWER = messages.Stacks('File "mine.py", line 9 in sync', _call("all_reduce", 1, "5"))


@pytest.mark.parametrize(
    ("left", "without_the_kill"),
    [
        ([_LOST], "raised"),
        ([], "killed"),  # as NCCL's watchdog does
    ],
)
@pytest.mark.parametrize("hung", [True, False])
def test_a_rank_that_outlives_its_peers_by_a_moment_hung_where_it_said(
    left: list[messages.Raised], without_the_kill: str, hung: bool
) -> None:
    """Ranks are killed one after another, and the next one's collective then fails."""
    child = RemoteChild(gone=True, exit_signal=signal.SIGABRT)
    for event in (_ANSWER, *left):
        child.take(event)
    assert root_cause.rank_outcomes([child], hung=hung)[0].outcome == without_the_kill
    child.cut_short = True
    outcome = root_cause.rank_outcomes([child], hung=hung)[0]
    assert outcome.outcome == ("hung" if hung else "ended")
    assert outcome.detail.endswith("line 9 in sync")
    child.take(messages.Raised("ValueError", "of its own", _FRAMES, 1.0, None))
    assert root_cause.rank_outcomes([child], hung=hung)[0].outcome == "raised"


def test_a_rank_that_leaves_as_its_world_ends_has_left() -> None:
    """That it said where it did so is not that it was asked."""
    child = RemoteChild(gone=True, exit_code=7, cut_short=True)
    child.take(_ANSWER)
    assert root_cause.rank_outcomes([child], hung=False)[0].outcome == "exited"


@pytest.mark.parametrize(
    ("heard", "told"), [("", "did not respond"), (_SAID, "line 3 in sync")], ids=["nothing", "low"]
)
def test_a_silent_rank_that_outlives_its_peers_hung_too(heard: str, told: str) -> None:
    child = RemoteChild(gone=True, exit_code=1, shaken=True, low_level_stacks=heard)
    child.take(_LOST)
    assert root_cause.rank_outcomes([child], hung=False)[0].outcome == "raised"
    child.cut_short = True
    assert (
        root_cause.rank_outcomes([child], hung=False)[0].outcome == "raised"
    )  # it was not asked in vain
    assert (
        root_cause.rank_outcomes([child], hung=True)[0].outcome == "hung"
    )  # a signal may have woken it
    child.ended = True
    assert root_cause.rank_outcomes([child], hung=False)[0].outcome == "ended"
    outcome = root_cause.rank_outcomes([child], hung=True)[0]
    assert outcome.outcome == "hung"
    assert told in outcome.detail


def test_a_rank_that_dies_of_being_shaken_was_hung() -> None:
    child = RemoteChild(gone=True, exit_signal=signal.SIGSEGV, low_level_stacks=_SAID)
    assert root_cause.rank_outcomes([child], hung=True)[0].outcome == "killed"
    child.shaken = True
    assert root_cause.rank_outcomes([child], hung=True)[0].outcome == "hung"


@pytest.mark.parametrize("shaken", [False, True])
def test_a_rank_that_is_done_after_it_was_asked_was_hung(shaken: bool) -> None:
    child = RemoteChild(
        gone=True, exit_code=0, released=True, low_level_stacks=_SAID, shaken=shaken
    )
    child.take(messages.Done(b""))
    assert root_cause.rank_outcomes([child], hung=True)[0].outcome == (
        "hung" if shaken else "finished"
    )
    child.take(messages.Stacks('File "mine.py", line 9 in later', None))
    assert root_cause.rank_outcomes([child], hung=True)[0].outcome == (
        "hung" if shaken else "finished"
    )
    child.take(messages.Done(b""))
    outcome = root_cause.rank_outcomes([child], hung=True)[0]
    assert outcome.outcome == "hung"
    assert ("line 3 in sync" if shaken else "line 9 in later") in outcome.detail
    assert "resumed when its stack was requested" in outcome.detail
    assert root_cause.rank_outcomes([child], hung=False)[0].outcome == "finished"


def _child(*events: messages.Event, shaken: bool = False) -> RemoteChild:
    child = RemoteChild(gone=True, exit_signal=signal.SIGKILL, cut_short=True, shaken=shaken)
    child.low_level_stacks = _SAID if shaken else ""
    for event in events:
        child.take(event)
    return child


def _in_call(number: int) -> messages.Stacks:
    call = _call("all_reduce", number, "5", finished=False)
    return messages.Stacks('File "mine.py", line 9 in sync', call)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (_in_call(8), "responded only after a signal, which can wake a rank"),
        (messages.Raised("OSError", "interrupted", _FRAMES, 1.0),
         "and raised OSError: interrupted"),
        (messages.Done(b""), "resumed when its stack was requested, after the deadline"),
    ],
    ids=["next call", "raised", "done"],
)  # fmt: skip
def test_what_a_signal_wakes_is_no_collective_mismatch(later: messages.Event, said: str) -> None:
    """Rank 1 holds the interpreter's lock in a call that the signal cuts short. What it enters
    then is another collective than its peers', which answered long before.
    """
    woken = _child(later, shaken=True)
    found = root_cause.rank_outcomes([_child(_in_call(7)), woken, _child(_in_call(7))], hung=True)
    assert [(o.rank, o.outcome) for o in found] == [(1, "hung"), (0, "hung"), (2, "hung")]
    assert said in found[0].detail
    assert "line 3 in sync" in found[0].detail
    assert found[0].collectives == ()
    (cause,) = explain(found)
    assert cause.cause == "hang"
    assert "rank 1 was in no collective" in cause.evidence


def test_a_mismatch_that_ranks_report_in_time_stays_one() -> None:
    found = root_cause.rank_outcomes([_child(_in_call(7)), _child(_in_call(8))], hung=True)
    assert explain(found)[0].cause == "collective-mismatch"


def test_a_stopped_rank_comes_first_and_is_said_to_be_stopped() -> None:
    stopped = _child()
    stopped.stopped = True
    found = root_cause.rank_outcomes([_child(_in_call(7)), stopped], hung=True)
    assert [(o.rank, o.outcome) for o in found] == [(1, "hung"), (0, "hung")]
    assert "stopped (state T, SIGSTOP)" in found[0].detail
    (cause,) = explain(found)
    assert cause.evidence == "rank 1 was stopped; rank 0 waited in all_reduce of [5], number 7"


@pytest.mark.parametrize(
    ("end", "advice"),
    [
        (RankEnd.RAISED, "read rank 1's traceback first"),
        (RankEnd.EXITED, "look for sys.exit() or os._exit() in the code that rank 1 runs"),
        (RankEnd.KILLED, "look for the sender of the signal to rank 1"),
    ],
)
def test_the_advice_is_about_what_a_rank_has_left(end: RankEnd, advice: str) -> None:
    (found,) = explain([Outcome(rank=1, outcome=end)])
    assert found.cause == "crash"
    assert found.suggestion.startswith(advice)
