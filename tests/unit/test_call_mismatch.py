"""Calls that ranks logged before their world failed: which do not match, and when that counts."""

import dataclasses
import os
import signal
from typing import Any

import msgspec
import pytest

from distcheck.judge.diagnosis.outcomes import explain
from distcheck.records.posted_calls import PostedCall
from distcheck.worlds import messages, root_cause
from distcheck.worlds.call_log import (
    _OFFSET,
    _SLOT_BYTES,
    _SLOTS,
    CallLog,
    LoggedCall,
    is_within_call,
    read_logged_calls,
)
from distcheck.worlds.messages import Proven
from distcheck.worlds.remote.coordinator import RemoteChild
from distcheck.worlds.world import mismatch_of, or_earlier


def call(number: int = 1, kind: str = "all_reduce", **about: Any) -> LoggedCall:
    """A collective of three elements in a world of three."""
    given: dict[str, Any] = {
        "rank": 0, "kind": kind, "name": kind, "group": "0", "number": number, "counts": (3,),
        "place": f"sync.py:{10 * number}", "dtype": "float32", "sizes": ((3,),),
        "op": "SUM" if kind == "all_reduce" else "",
    }  # fmt: skip
    ranks = about.pop("ranks", (0, 1, 2))
    if "count" in about:
        about |= {"counts": (about["count"],), "sizes": ((about.pop("count"),),)}
    return LoggedCall(ranks, PostedCall(**{**given, **about}))


def of_rank(rank: int, one: LoggedCall) -> LoggedCall:
    return LoggedCall(one.ranks, dataclasses.replace(one.call, rank=rank))


class Within(RemoteChild):
    """A rank that waited for a call when it ended."""

    was_within_call = True  # type: ignore[assignment]


def failed(*logs: list[LoggedCall], within_call: bool = True) -> list[RemoteChild]:
    """Ranks of which all raised, the first one first."""
    children = []
    for rank, calls in enumerate(logs):
        child = RemoteChild(gone=True, exit_code=1, heard_called=[of_rank(rank, c) for c in calls])
        child.take(
            messages.Raised("RuntimeError", "no", "no", float(rank), within_call=within_call)
        )
        children.append(child)
    return children


def said_of(*logs: list[LoggedCall], within_call: bool = True) -> str:
    children = failed(*logs, within_call=within_call)
    found = mismatch_of(children[0], children)
    return "" if found is None else found.what


def test_the_first_calls_that_are_apart_are_named_with_the_odd_rank() -> None:
    odd = [call(1), call(2, count=4, place="other.py:7"), call(3, kind="barrier")]
    alike = [call(1), call(2), call(3)]
    what = said_of(alike, alike, odd)
    assert "at call 2, ranks 0, 1 called all_reduce(SUM) of [3] float32 at sync.py:20" in what
    assert "rank 2 called all_reduce(SUM) of [4] float32 at other.py:7" in what
    assert "they differ in the number of elements" in what
    assert "most ranks agree, and rank 2 made a different call" in what
    assert said_of(alike, alike, alike) == ""
    assert said_of(alike, alike, odd, within_call=False) == "", "it failed of something else"


def test_a_rank_that_logged_nothing_may_be_on_any_side() -> None:
    what = said_of([call()], [call(op="MAX")], [])
    assert "rank 2 reported no data" in what
    assert "so it is unknown which is wrong" in what
    assert "equally large" not in what


def test_ranks_of_other_groups_are_not_compared() -> None:
    pair = call(kind="barrier", group="1", ranks=(1, 2))
    assert said_of([call()], [pair], [pair]) == ""
    remade = call(kind="barrier", ranks=(1, 2))
    assert said_of([call()], [remade], [remade]) == "", "the name of a group that was destroyed"


def test_splits_are_what_the_others_expect() -> None:
    def of(sent: tuple[int, ...], received: tuple[int, ...]) -> list[LoggedCall]:
        about = {"name": "all_to_all_single", "counts": (), "in_splits": sent}
        return [call(kind="all_to_all", out_splits=received, **about)]

    right = of((1, 1, 1), (1, 1, 1))
    assert said_of(right, right, right) == ""
    assert "they differ in the split sizes" in said_of(right, of((1, 1, 1), (2, 1, 1)), right)


def test_a_message_that_its_receive_does_not_fit() -> None:
    sent = call(kind="send", peer=1, count=4, place="a.py:1")
    received = call(kind="recv", peer=0, place="b.py:2")
    what = said_of([sent], [received], [])
    assert "rank 0 called send(to rank 1) of [4] float32 at a.py:1" in what
    assert "rank 1 called recv(from rank 0) of [3] float32 at b.py:2" in what
    assert said_of([call(kind="send", peer=1)], [received], []) == ""
    from_any = call(2, kind="recv", peer=None)
    assert said_of([sent], [received, from_any], []) == "", "it may have taken that message"
    assert said_of([call(kind="send", peer=1, count=4, tag=1)], [received], []) == ""


def test_a_library_that_aborted_the_rank_says_that_sizes_differ() -> None:
    children = failed([call()], [call(count=4)], [call()])
    aborted = RemoteChild(gone=True, exit_signal=signal.SIGABRT, heard_called=[call()])
    children[0] = aborted
    assert mismatch_of(aborted, children) is None, "it may have been anything"
    within = Within(gone=True, exit_signal=signal.SIGSEGV, heard_called=[call()])
    assert mismatch_of(within, [within, *children[1:]]) is not None
    within.exit_signal = signal.SIGTERM
    assert mismatch_of(within, [within, *children[1:]]) is None
    aborted.take_output(f"what(): is there a {root_cause.SIZES_DIFFER}?".encode())
    found = mismatch_of(aborted, children)
    assert found is not None
    for child in children:
        child.proven = found
    (cause,) = explain(root_cause.rank_outcomes(children, hung=False))
    assert cause.cause == "collective-mismatch"
    assert cause.evidence == found.what
    assert "rank 1 called all_reduce(SUM) of [4]" in cause.evidence


def test_a_rank_that_raised_within_a_call_is_a_mismatch_and_no_crash() -> None:
    children = failed([call()], [call(op="MAX")], [call()])
    assert explain(root_cause.rank_outcomes(children, hung=False))[0].cause == "crash"
    found = mismatch_of(children[0], children)
    for child in children:
        child.proven = found
    outcomes = root_cause.rank_outcomes(children, hung=False)
    assert explain(outcomes)[0].cause == "collective-mismatch"
    assert {outcome.outcome for outcome in outcomes} == {"raised"}


def test_a_deadlock_after_calls_that_are_apart_follows_from_them() -> None:
    deadlock = Proven("deadlock", "every rank waits")
    apart = failed([call()], [call(kind="broadcast", root=1)], [call()])
    assert or_earlier(deadlock, apart).how == "mismatch"
    assert or_earlier(deadlock, failed([call()], [call()], [call()])) is deadlock
    mismatch = Proven("mismatch", "another one")
    assert or_earlier(mismatch, apart) is mismatch


@pytest.mark.parametrize(
    "strange",
    [
        {"ranks": (0, 1, 99)}, {"ranks": (0, 0, 1)}, {"ranks": (1, 2)}, {"root": 3}, {"root": -1},
        {"kind": "recv", "peer": 7},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_rank_can_have_called_is_left_out(strange: dict[str, Any]) -> None:
    """A process of the code under test may write anything."""
    assert said_of([call(op="MAX", **strange)], [call()], [call()]) == ""
    both = {"kind": "all_to_all", "op": "", "in_splits": (1,)}
    said_of([call(**both)], [call(**both)], [])  # and raises nothing


def test_a_log_keeps_the_latest_calls() -> None:
    fd = os.memfd_create("log")
    assert read_logged_calls(fd) == []
    log = CallLog(fd)
    for number in range(_SLOTS + 3):
        log.write(*msgspec.structs.astuple(call(number)))
    log.write((0,), call(1000, place="x" * _SLOT_BYTES).call)  # does not fit
    assert [one.call.number for one in read_logged_calls(fd)] == list(range(3, _SLOTS + 3))
    for yes in (True, False):
        log.within_call(yes)
        assert is_within_call(fd) is yes
    os.pwrite(fd, b"\xff" * 40, _OFFSET)
    os.pwrite(fd, b"\x05" + bytes(11) + b"hello", _OFFSET + _SLOT_BYTES)
    assert len(read_logged_calls(fd)) == _SLOTS - 2
    os.close(fd)
    assert read_logged_calls(fd) == []
