"""What a comparison is said to show, it shows: however the mistaken sum was rounded."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcheck.judge.checks.comparison import compare_by_norm, compare_within
from distcheck.judge.checks.sensitivity import MeanSummands, mistakes_shown_by_sum
from distcheck.records.mistakes import (
    MISTAKES,
    NOTHING,
    RevealedMistakes,
    merge_revealed_mistakes,
    merge_two_revealed_mistakes,
    smallest_revealed_scale_errors,
)


def parts_of(
    gradients: torch.Tensor, weights: torch.Tensor, bound: torch.Tensor | float
) -> MeanSummands:
    """Mean losses, weighted by samples."""
    return MeanSummands(
        gradients=gradients, shares=weights, own=torch.ones(len(gradients), dtype=torch.float64),
        weights=weights, bound=bound,
    )  # fmt: skip


def shown(gradients: torch.Tensor, bound: torch.Tensor | float, **more: object) -> RevealedMistakes:
    world, elements = gradients.shape
    even = torch.full((world,), 1 / world, dtype=torch.float64)

    def at(stride: int) -> MeanSummands:
        wide = bound[::stride] if isinstance(bound, torch.Tensor) else bound
        return parts_of(gradients[:, ::stride], even, wide)

    return mistakes_shown_by_sum(at, elements=elements, ranks=range(world), **more)  # type: ignore[arg-type]


def worlds_of_gradients() -> st.SearchStrategy[torch.Tensor]:
    """[W, n] in float64, of numbers that float32 holds; some ranks may be alike, or zero."""
    number = st.floats(-4, 4, width=32)
    return st.integers(2, 5).flatmap(
        lambda world: st.integers(1, 6).flatmap(
            lambda n: st.lists(
                st.lists(number, min_size=n, max_size=n), min_size=world, max_size=world
            ).map(lambda rows: torch.tensor(rows, dtype=torch.float64))
        )
    )


@given(worlds_of_gradients(), st.sampled_from([0.0, 1e-3, 0.1, 0.6]))
@settings(max_examples=75, deadline=None)
def test_what_shows_fails_however_it_was_rounded(gradients: torch.Tensor, coarse: float) -> None:
    """The mistaken sum is moved towards the mean by all that its own roundings allow."""
    world = len(gradients)
    parts = gradients / world
    mean, sizes = parts.sum(0), parts.abs().sum(0)
    unit = coarse + 1e-9
    bound = sizes * unit + 1e-12
    found = shown(gradients, bound)
    left = {
        "times-world": [(mean * world, sizes * world)],
        "divided-by-world": [(mean / world, sizes / world)],
        "missing-sync": [(own, own * 0) for own in gradients],
        "doubled-rank": [(mean + part, sizes + part.abs()) for part in parts],
        "lost-rank": [(mean - part, sizes - part.abs()) for part in parts],
    }
    for name, results in left.items():
        for rank, (result, terms) in enumerate(results):
            place = rank if MISTAKES[name].of_ranks else 0
            if place in found.shown[name]:
                slack = terms * unit + 1e-12 if name != "missing-sync" else torch.zeros_like(terms)
                gap = mean - result
                moved = result + gap.sign() * torch.minimum(gap.abs(), slack)
                assert not compare_within(moved, mean, bound).ok, (name, rank)


@given(worlds_of_gradients(), st.sampled_from([1e-6, 1e-2, 0.5]))
@settings(max_examples=50, deadline=None)
def test_what_shows_by_norm_fails(gradients: torch.Tensor, tolerance: float) -> None:
    mean = gradients.mean(0)
    found = shown(gradients, tolerance)
    for rank in found.shown["missing-sync"]:
        assert not compare_by_norm(gradients[rank], mean, tolerance).ok
    for rank in found.shown["lost-rank"]:
        assert not compare_by_norm(mean - gradients[rank] / len(gradients), mean, tolerance).ok


def test_gradients_that_are_alike_show_no_missing_sync() -> None:
    found = shown(torch.ones(4, 3, dtype=torch.float64), torch.full((3,), 1e-7))
    assert found.alike
    assert not found.zero
    assert found.shown["missing-sync"] == ()
    assert found.shown["lost-rank"] == (), "the mean of the others is the mean of all"
    assert found.shown["times-world"] == (0,)
    assert found.counts


def test_zero_shows_nothing() -> None:
    found = shown(torch.zeros(4, 3, dtype=torch.float64), torch.full((3,), 1e-7))
    assert found.zero
    assert not found.counts
    assert not any(found.shown.values())
    assert float(found.scale) == float("inf")


def test_a_rank_without_a_part_cannot_be_seen_to_be_lost() -> None:
    gradients = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    found = shown(gradients, torch.full((2,), 1e-7))
    assert found.shown["lost-rank"] == (0, 1), "the sum is the same without it"
    assert found.shown["doubled-rank"] == (0, 1)
    assert found.shown["missing-sync"] == (0, 1, 2)


def test_what_the_sample_does_not_hold_is_looked_for_in_the_whole() -> None:
    gradients = torch.zeros(2, 100_000, dtype=torch.float64)
    gradients[0, 77_777] = 1.0
    found = shown(gradients, torch.full((100_000,), 1e-9))
    assert found.shown["missing-sync"] == (0, 1)
    assert found.shown["times-world"] == (0,)


def test_an_earlier_step_and_a_twin() -> None:
    gradients = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    bound, mean = torch.full((2,), 1e-6), gradients.mean(0)
    same = shown(gradients, bound, before=mean, others=[mean + 1, mean])
    assert same.shown["stale"] == ()
    assert same.shown["other-parameter"] == (), "one of the two would pass for this one"
    other = shown(gradients, bound, before=mean + 1e-3, others=[mean + 1])
    assert other.shown["stale"] == other.shown["other-parameter"] == (0,)
    assert "stale" not in shown(gradients, bound).shown


def test_the_scale_that_shows_is_twice_the_bound() -> None:
    gradients = torch.tensor([[2.0, 4.0], [2.0, 4.0]], dtype=torch.float64)
    bound = torch.tensor([1e-3, 1e-3], dtype=torch.float64)
    found = shown(gradients, bound)
    assert abs(float(found.scale) - 2e-3 / 4.0) < 1e-12
    assert smallest_revealed_scale_errors({"a": found, "b": NOTHING}) == (found.scale, found.scale)
    assert smallest_revealed_scale_errors({"b": NOTHING}) is None


def test_steps_add_up_and_mistakes_are_united() -> None:
    one = RevealedMistakes(
        shown={"missing-sync": (0,), "stale": ()}, scale=0.5, zero=True, alike=True, steps=1
    )
    two = RevealedMistakes(
        shown={"missing-sync": (1,)}, scale="inf", zero=False, alike=True, steps=2
    )
    merged = merge_two_revealed_mistakes(one, two)
    assert merged.shown == {"missing-sync": (0, 1), "stale": ()}
    assert (merged.scale, merged.zero, merged.alike, merged.steps) == (0.5, False, True, 3)
    assert merge_revealed_mistakes([{"a": one}, {"a": two, "b": two}]) == {"a": merged, "b": two}


def test_where_bits_are_compared_a_wide_bound_hides_nothing_recorded() -> None:
    """A gradient that is a step old differs in its bits, however wide the bound of a sum is."""
    gradients = torch.tensor([[1.0, 2.0], [1.5, 2.25]], dtype=torch.float64)
    mean, wide = gradients.mean(0), gradients.abs().mean(0)
    even = torch.full((2,), 0.5, dtype=torch.float64)

    def found(bits: torch.Tensor | None, before: torch.Tensor) -> RevealedMistakes:
        def at(stride: int) -> MeanSummands:
            parts = parts_of(gradients, even, wide)
            return dataclasses.replace(parts, expected=bits)

        return mistakes_shown_by_sum(at, elements=2, ranks=range(2), before=before)

    other, rounded = mean + 2.0**-8, mean + 2.0**-9
    assert found(None, other).shown["stale"] == ()
    assert found(rounded, other).shown["stale"] == (0,)
    assert found(rounded, rounded).shown["stale"] == ()  # the same bits, if not the mean's
    assert found(rounded, other).shown["missing-sync"] == (0, 1)
    assert found(rounded, other).shown["divided-by-world"] == ()  # within its own roundings
