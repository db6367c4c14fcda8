"""Each private name of Hypothesis is in the one that is installed, and does what is relied on."""

from datetime import timedelta

import pytest

from distcheck.testing import hypothesis_compat

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def test_the_settings_of_a_test_are_those_that_run() -> None:
    seen: list[int] = []

    @hypothesis.settings(deadline=timedelta(seconds=7), max_examples=1, database=None)
    @hypothesis.given(st.integers())
    def test(number: int) -> None:
        seen.append(number)

    given = hypothesis_compat.given_function(test)
    own = getattr(given, hypothesis_compat.SETTINGS)
    assert own.deadline == timedelta(seconds=7)
    setattr(given, hypothesis_compat.SETTINGS, hypothesis.settings(own, max_examples=5))
    test()
    assert len(seen) == 5


def test_an_example_is_put_in_place_of_the_one_that_runs() -> None:
    seen: list[object] = []

    @hypothesis.settings(max_examples=1, database=None)
    @hypothesis.given(st.none())
    def test(_: None) -> None:
        own = hypothesis_compat.current_build_context()
        with hypothesis_compat.running_example(None):
            seen.append(hypothesis_compat.current_build_context())
        with hypothesis_compat.running_example(own):
            seen.append(hypothesis_compat.current_build_context() is own)
            hypothesis.event("mine")
            hypothesis.target(3.0, label="far")
        seen.extend([own.is_final, dict(own.data.events), own.data.target_observations["far"]])

    assert hypothesis_compat.current_build_context() is None
    test()
    assert seen == [None, True, False, {"mine": ""}, 3.0]


def test_examples_are_not_observed_unless_asked() -> None:
    assert not hypothesis_compat.is_observed()
