"""Which worlds are asked for, and what is concluded from how they were."""

from collections.abc import Callable

import pytest

from distcheck.judge.rerun_bisection import BisectionResult, RerunBisection
from distcheck.worlds.surroundings import FACTORS, TOGETHER, Surroundings, separate

ALL = separate(3, delayed=True)


def taken_apart(
    differs: Callable[[Surroundings, int], bool], given: Surroundings = ALL
) -> tuple[BisectionResult, list[Surroundings]]:
    apart, asked = RerunBisection(given), []
    while apart.next is not None:
        assert apart.conclusion is None
        asked.append(apart.next)
        apart.note(differs(apart.next, len(asked)))
    assert apart.conclusion is not None
    assert apart.conclusion.worlds == len(asked) <= 10
    return apart.conclusion, asked


@pytest.mark.parametrize("factor", [name for name in FACTORS if name != "delays"])
def test_the_factor_that_makes_the_difference_is_found(factor: str) -> None:
    found, asked = taken_apart(lambda world, _: factor in world.factors)
    assert (found.depends, found.factors) == (True, (factor,))
    alone = Surroundings((factor,), 3)
    assert asked[0] == TOGETHER
    assert asked[-4:] == [TOGETHER, alone, TOGETHER, alone]


def test_what_differs_without_any_factor_is_chance() -> None:
    found, asked = taken_apart(lambda world, _: True)
    assert (found.depends, found.factors, asked) == (False, (), [TOGETHER])


def test_a_race_that_delays_show_is_no_process_state() -> None:
    found, asked = taken_apart(lambda world, _: "delays" in world.factors)
    assert (found.depends, found.factors) == (False, ("delays",))
    assert asked == [TOGETHER, Surroundings(("delays",), 3)]


@pytest.mark.parametrize("when", range(1, 8))
def test_what_differs_once_is_chance(when: int) -> None:
    """A race that shows in one world of many, whichever that is."""
    found, _ = taken_apart(lambda world, number: number == when)
    assert not found.depends


@pytest.mark.parametrize("when", [8, 10])
def test_a_suspect_that_does_not_differ_again_is_chance(when: int) -> None:
    found, asked = taken_apart(
        lambda world, number: "interpreters" in world.factors and number != when
    )
    assert asked[when - 1] == Surroundings(("interpreters",), 3)
    assert (found.depends, found.worlds) == (False, when)


def test_what_takes_several_factors_is_said_to() -> None:
    found, asked = taken_apart(lambda world, _: {"nodes", "memory"} <= set(world.factors))
    assert found.depends
    assert set(found.factors) == set(FACTORS) - {"delays"}
    assert all("delays" not in world.factors for world in asked[-1:])


def test_without_delays_none_are_tried() -> None:
    given = separate(3, delayed=False)
    _, asked = taken_apart(lambda world, _: "interpreters" in world.factors, given)
    assert not any("delays" in world.factors for world in asked)
