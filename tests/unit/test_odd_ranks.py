"""Which rank is the odd one: the diagnosis and the picture name the same, and no victim."""

from collections.abc import Sequence
from typing import Any

import pytest

from distcheck.judge.diagnosis import outcomes
from distcheck.records import Collective, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.odd_ranks import majority_call, ranks_outside_the_majority
from distcheck.reports.pictures import timeline

Known = dict[str, Any]
MISMATCH: Known = {"sizes_differ": True, "text": "a distributed collective mismatch in your code?"}
PEER: Known = {"lost_peer": True, "lost_at": " at mine.py:3", "error": "RuntimeError: closed"}


def calls(*shapes: str) -> tuple[Collective, ...]:
    """Calls of one group, numbered from 1; the last is not finished."""
    return tuple(
        Collective(
            number=n, name="all_reduce", shapes=shape, group="0", finished=n < len(shapes)
        )
        for n, shape in enumerate(shapes, 1)
    )  # fmt: skip


def rank(
    number: int, outcome: RankEnd, known: Known | None = None, shapes: Sequence[str] = ()
) -> Outcome:
    about = {"step": 1, "phase": "sync", **(known or {})}
    return Outcome(rank=number, outcome=outcome, collectives=calls(*shapes), **about)


def both(*ranks: Outcome) -> tuple[str, str]:
    """What the diagnosis and the picture say."""
    (found,) = outcomes.explain(ranks)
    picture = timeline.draw("p", ranks)
    assert picture is not None
    return f"{found.cause}: {found.evidence}", picture.says


def test_the_odd_rank_of_the_picture_is_the_diagnosis_odd_rank() -> None:
    said, shown = both(
        rank(1, RankEnd.RAISED, MISMATCH, ["8", "8"]),
        rank(0, RankEnd.RAISED, PEER, ["8", "5"]),
        rank(2, RankEnd.RAISED, PEER, ["8", "8"]),
    )
    words = "t call 2, rank 0 called all_reduce of [5] and ranks 1, 2 called all_reduce of [8]"
    assert said == f"collective-mismatch: a{words}"
    assert shown == f"A{words}."


@pytest.mark.parametrize("received", [0, 1])
def test_one_to_one_is_a_tie_and_accuses_neither(received: int) -> None:
    """gloo ends the rank that received; the picture took the first call that it met for usual."""
    ranks = [
        rank(received, RankEnd.KILLED, MISMATCH, ["8", "58"[received]]),
        rank(1 - received, RankEnd.RAISED, PEER, ["8", "85"[received]]),
    ]
    said, shown = both(*ranks)
    assert said.endswith("; the groups are equally large, so it is unknown which is wrong")
    assert shown.endswith("; the groups are equally large, so it is unknown which is wrong.")
    assert "wrong size on rank" not in said
    picture = timeline.draw("p", ranks)
    assert picture is not None
    assert [row[0] for row in picture.table.rows if row[3] == "differs"] == ["0", "1"]


def test_a_rank_that_could_not_be_asked_may_be_on_either_side() -> None:
    said, shown = both(
        rank(2, RankEnd.KILLED, MISMATCH),
        rank(0, RankEnd.RAISED, PEER, ["8", "5"]),
        rank(1, RankEnd.RAISED, PEER, ["8", "8"]),
    )
    assert "rank 2 reported no data; the groups are equally" in said
    assert "rank 2 reported no data; the groups are equally" in shown


def test_a_mismatch_of_which_nothing_else_is_known_names_the_receiver_as_such() -> None:
    (found,) = outcomes.explain([rank(1, RankEnd.KILLED, MISMATCH), rank(0, RankEnd.RAISED, PEER)])
    assert found.evidence.startswith("rank 1 received a message of a different size than its call")
    assert "it is unknown which rank made the different call" in found.evidence


def test_what_the_logs_of_ranks_prove_is_what_both_say() -> None:
    """Also of a rank that was aborted, and gave no data otherwise."""
    what = "at call 2, ranks 1, 2 called this and rank 0 called that; rank 0 made a different call"
    said, shown = both(
        rank(2, RankEnd.KILLED, {"proven": "mismatch", "why": what}),
        rank(0, RankEnd.RAISED, PEER, ["8", "5"]),
        rank(1, RankEnd.RAISED, PEER, ["8", "8"]),
    )
    assert said == f"collective-mismatch: {what}"
    assert shown.startswith(f"A{what[1:]}.")
    assert "equally" not in shown


def test_a_hang_names_the_same_odd_rank() -> None:
    def hung(number: int, shape: str) -> Outcome:
        last = calls("8", shape)[-1]
        return rank(number, RankEnd.HUNG, {"call": last}, ["8", shape])

    said, shown = both(hung(0, "8"), hung(1, "8"), hung(2, "5"))
    words = "t call 2, rank 2 called all_reduce of [5] and ranks 0, 1 called all_reduce of [8]"
    assert said.endswith(f"; a{words}")
    assert shown == f"A{words}."


def test_victims_are_never_the_cause() -> None:
    left = [rank(1, RankEnd.RAISED, PEER, ["8", "8"]), rank(0, RankEnd.FINISHED)]
    (found,) = outcomes.explain(left)
    assert (found.cause, found.evidence) == (
        "collective-mismatch", "rank 0 finished and exited while rank 1 still waited in a "
            "collective",
    )  # fmt: skip
    (found,) = outcomes.explain([rank(0, RankEnd.RAISED, PEER), rank(1, RankEnd.RAISED, PEER)])
    assert found.evidence == (
        "ranks 0, 1 report that a peer exited, but no rank is known to have failed first"
    )


def test_the_picture_names_no_victim_for_what_it_did_not_call() -> None:
    """Rank 1 was killed; rank 2, which waited for it, had come less far than rank 0."""
    said, shown = both(
        rank(1, RankEnd.KILLED, {"ended_by": "killed by SIGKILL"}),
        rank(0, RankEnd.RAISED, PEER, ["8", "8", "8"]),
        rank(2, RankEnd.RAISED, PEER, ["8", "8"]),
    )
    assert said.startswith("crash: rank 1 was killed")
    assert shown == "Rank 1 failed first; the missing calls of other ranks are a consequence."
    own = rank(2, RankEnd.RAISED, {"error": "ValueError: "}, ["8", "8"])
    said, shown = both(own, rank(0, RankEnd.RAISED, PEER, ["8", "8", "8"]))
    assert said.startswith("crash: rank 2 raised")
    assert shown == "Call 3 is missing on rank 2."


def test_majorities() -> None:
    assert ranks_outside_the_majority({"a": [0, 2], "b": [1]}) == [1]
    assert ranks_outside_the_majority({"a": [0], "b": [1]}) == []
    assert ranks_outside_the_majority({"a": [0, 1]}) == []
    assert majority_call({"a": [0, 2], "b": [1]}) == "a"
    assert majority_call({"a": [0, 2], "b": [1]}, unknown=1) == ""
    assert majority_call({"a": [0]}, unknown=3) == "a"
