"""Ranks decide together whether a recording goes on: what they observe may differ by rank."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from distcheck.job.inside import rank
from distcheck.recordings.jobs.records import rank_folder


@pytest.mark.parametrize("observed", list(product([True, False], repeat=3)))
def test_all_ranks_come_to_one_decision(tmp_path: Path, observed: tuple[bool, ...]) -> None:
    """Whichever of them were left with their own gradients, as the root of a broadcast is."""
    world = len(observed)
    for number in range(world):
        rank_folder(tmp_path, number).mkdir()

    def decide(number: int, step: int) -> bool:
        return rank.all_independent(tmp_path, number, world, step, apart=observed[number])

    with ThreadPoolExecutor(world) as ranks:
        for step in (8, 9):  # a recording may go on several times
            decided = list(ranks.map(decide, range(world), [step] * world))
            assert decided == [all(observed)] * world


def test_absent_ranks_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one sleeps: the others go on by what they have seen, and do not wait for ever."""
    monkeypatch.setattr(rank, "_WAIT_S", 0.0)
    for number in range(2):
        rank_folder(tmp_path, number).mkdir()
    assert rank.all_independent(tmp_path, 0, 2, 8, apart=True)
