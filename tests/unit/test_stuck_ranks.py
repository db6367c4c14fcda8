"""Why ranks that all wait can never go on: one reason each, and who waits for whom."""

from collections.abc import Sequence

import pytest

from distcheck.records.posted_calls import Wait, find_wait_cycle, why_stuck
from tests.unit.test_proofs import message


def waits_for(rank: int, kind: str, peer: int, tag: int = 0) -> Wait:
    return Wait(message(rank, kind, peer, tag=tag), (peer,), group=(0, 1, 2))


def test_a_send_and_a_receive_that_differ_in_the_tag_are_a_mismatch() -> None:
    how, said = why_stuck({0: waits_for(0, "send", 1, 7), 1: waits_for(1, "recv", 0, 8)}, [2])
    assert how == "mismatch"
    assert said.endswith("they differ in the tag")
    assert "sync.py:0" in said
    assert "sync.py:1" in said


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("recv", "the receive of rank 0 at sync.py:0 has no matching send"),
        ("send", "the send of rank 0 at sync.py:0 has no matching receive"),
    ],
)
def test_a_message_to_a_rank_that_has_finished_has_no_other_end(kind: str, sentence: str) -> None:
    how, said = why_stuck({0: waits_for(0, kind, 1)}, [1, 2])
    assert how == "unmatched"
    assert said.startswith(sentence)
    assert said.endswith("ranks 1, 2 finished")


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    waits = {rank: waits_for(rank, "recv", (rank + 1) % 3) for rank in range(3)}
    how, said = why_stuck(waits, [])
    assert how == "deadlock"
    assert (
        "a cycle: rank 0 waits for rank 1, rank 1 waits for rank 2, rank 2 waits for rank 0" in said
    )


@pytest.mark.parametrize(
    ("missing", "cycle"),
    [
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [1], 1: [2], 2: [1]}, [1, 2]),  # rank 0 waits for the cycle, and is not of it
        ({0: [0]}, [0]),
        ({0: [3], 1: [0]}, []),  # rank 3 has finished
        ({0: [3, 1], 1: [0]}, [0, 1]),
        ({}, []),
    ],
)
def test_cycles_have_only_waiting(missing: dict[int, Sequence[int]], cycle: list[int]) -> None:
    assert find_wait_cycle(missing) == cycle
