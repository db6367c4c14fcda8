"""What a process notes of its calls."""

from typing import Any

import pytest
import torch

from distcheck.worlds import call_recorder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> call_recorder.PostedCalls:
    """Notes of a process, as rank 0 of groups of two."""
    here = call_recorder.PostedCalls()
    monkeypatch.setattr(call_recorder, "HERE", here)
    monkeypatch.setattr(here, "ranks_of", lambda *_: ((0, 1), 0))
    return here


@pytest.mark.parametrize(("counted", "expected"), [(0, 0), (1, 1)])
def test_refused_posts(here: call_recorder.PostedCalls, counted: int, expected: int) -> None:
    """Unless torch has counted it. The calls after it would have other numbers than elsewhere."""

    class Group:
        group_name, calls = f"refusing {counted}", 7

        def _get_sequence_number_for_group(self) -> int:
            return self.calls

    def refuse(group: Group, *_: Any) -> None:
        group.calls += counted
        raise ValueError("no such tag")

    post = call_recorder._message(refuse, "send", 3)
    with pytest.raises(ValueError, match="no such tag"):
        post(Group(), [torch.ones(2)], 1, 0)
    assert here.of_group[Group.group_name] == expected
    assert here.messages[Group.group_name, "send", 1, 0] == expected


class Counting:
    """A group in which every call counts."""

    group_name, calls = "counting", 0

    def _get_sequence_number_for_group(self) -> int:
        return self.calls


class Work:
    """What a call returns."""


def posts(group: Counting, *_: Any) -> Work:
    group.calls += 1
    return Work()


def test_a_rank_that_posts_within_a_wait_is_active(here: call_recorder.PostedCalls) -> None:
    """A handler of a signal may do so, where the wait is a loop in Python."""
    taken_back: list[Any] = []
    here.after_wait = taken_back.append
    post = call_recorder._collective(posts, "barrier", "barrier", lambda given: ((), ()))
    group = Counting()
    work = post(group)

    def loops(work: Work) -> str:
        assert here.on is not None
        waited_for = here.on
        assert taken_back == []
        post(group)
        assert here.on is None
        assert taken_back == [waited_for]
        return "done"

    assert here.wait(loops, work, (), {}) == "done"
    assert [noted.call.number for noted in here.notes] == [1, 2]
