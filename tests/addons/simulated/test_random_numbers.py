"""Ranks of one process draw the numbers that each would draw alone."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

from distcheck.addons.simulated.isolation import Generators, GeneratorStates

TURNS = 6


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leaves the generators as they were."""
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    yield
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    numpy.random.set_state(before[2])


def draws(turn: int) -> list[float]:
    """What a rank draws in a turn: odd counts, so that a normal number is kept for the next one."""
    found = [random.random(), random.gauss(), float(torch.rand(()))]
    if turn != 3:  # in one turn NumPy's words stay as they are
        found += [float(numpy.random.rand()), *numpy.random.randn(1 + 2 * (turn % 2)).tolist()]
    else:
        found += [float(numpy.random.randn())]  # the one that was kept
    return found


def seeded(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)


@pytest.mark.parametrize("copied", [True, False], ids=["as_memory", "by_the_library"])
def test_each_rank_draws_its_own_numbers(copied: bool) -> None:
    alone = []
    for rank in range(3):
        seeded(rank)
        alone.append([draws(turn) for turn in range(TURNS)])
    generators = Generators()
    ranks: list[GeneratorStates] = []
    for rank in range(3):
        seeded(rank)
        ranks.append(generators.beginning())
    assert generators._python is not None
    assert generators._numpy is not None
    if not copied:
        generators._python = generators._numpy = None
        for rank in range(3):
            seeded(rank)
            ranks[rank] = generators.beginning()
    together: list[list[list[float]]] = [[], [], []]
    for turn in range(TURNS):
        for rank, own in enumerate(ranks):
            generators.give(own)
            together[rank].append(draws(turn))
            generators.take(own)
    assert together == alone


def test_a_rank_may_replace_numpys_generator() -> None:
    before = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    generators = Generators()
    seeded(5)
    usual, other = generators.beginning(), generators.beginning()
    expected = numpy.random.rand(3).tolist()
    try:
        generators.give(other)
        numpy.random.set_bit_generator(numpy.random.PCG64(1))  # type: ignore[attr-defined]
        first = numpy.random.rand()
        generators.take(other)
        generators.give(usual)
        assert numpy.random.rand(3).tolist() == expected
        generators.take(usual)
        generators.give(other)
        found = [first, numpy.random.rand()]
        assert found == numpy.random.RandomState(numpy.random.PCG64(1)).rand(2).tolist()
    finally:
        numpy.random.set_bit_generator(before)  # type: ignore[attr-defined]
