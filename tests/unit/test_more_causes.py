"""Causes from numbers: what comes first, what is not invented, and mistakes beside each other."""

import msgspec
import pytest

from distcheck.judge.diagnosis import diagnose, gradients
from distcheck.judge.diagnosis.gradients import explain_step
from distcheck.judge.diagnosis.measurements import (
    GradientMatch,
    LocalGradientFacts,
    Measurements,
    NonFiniteGradient,
    ParameterFacts,
    PassFacts,
    StepFacts,
    UpdateFacts,
)
from distcheck.judge.diagnosis.wording import number_text
from tests.unit.test_diagnosis import ENDS, causes, equal, failed, measured, named


def test_a_factor_is_printed_so_that_it_differs_from_what_it_stands_beside() -> None:
    assert number_text(1.5) == "1.5"
    assert number_text(1.0) == "1"
    assert number_text(1 + 2e-9) == "1.000000002"
    assert number_text(4 - 8e-9, beside=(4,)) == "3.99999999"
    slightly = measured([[0.25 * (1 + 4e-6)] * 4] * 4, equal(4))
    (found,) = explain_step(slightly)
    assert found.cause == "wrong-divisor"
    assert "divided by 4 and not by 4" not in found.evidence


def test_a_sign_is_called_a_sign() -> None:
    (found,) = explain_step(measured([[-0.25] * 4] * 4, equal(4)))
    assert found.cause == "wrong-sign"
    (found,) = explain_step(measured([[0.25, 0.25, -0.25, 0.25]] * 4, equal(4)))
    assert found.cause == "wrong-sign"
    assert "the contribution of rank 2 is negated" in found.evidence


@pytest.mark.parametrize("world", [3, 4, 5, 6])
def test_a_chain_of_means_of_two(world: int) -> None:
    weights = [2.0 ** -(world - 1), *(2.0 ** -(world - r) for r in range(1, world))]
    assert sum(weights) == 1.0
    found = explain_step(measured([weights] * world, equal(world)))
    # Of three ranks, one may as well count twice in a sum that is divided by four.
    also = {"duplicated-rank"} if world == 3 else set()
    assert {f.cause for f in found} == {"chained-mean", *also}
    assert f"1/{2 ** (world - 1)}" in found[0].evidence


def test_a_lost_rank_and_a_sum_that_is_not_divided_are_both_said() -> None:
    found = explain_step(measured([[1.0, 0.0, 1.0, 1.0]] * 4, equal(4)))
    assert [f.cause for f in found] == ["dropped-rank", "missing-division"]
    assert not any("cannot tell" in f.evidence for f in found)
    found = explain_step(measured([[0.3, 0.0, 0.3, 0.3]] * 4, equal(4)))
    assert [f.cause for f in found] == ["dropped-rank", "wrong-divisor"]


def test_a_rank_that_counts_half_is_not_all_the_others_twice() -> None:
    (found,) = explain_step(measured([[0.25, 0.125, 0.25, 0.25]] * 4, equal(4)))
    assert found.cause == "wrong-divisor"
    assert "relative weights 1, 0.5, 1, 1 on" in found.evidence
    assert "on rank 1 had a different scale" in found.evidence
    twice = explain_step(measured([[0.25, 0.5, 0.25, 0.25]] * 4, equal(4)))
    assert [f.cause for f in twice] == ["duplicated-rank"]


def test_a_sum_that_one_rank_keeps() -> None:
    weights = [[1.0] * 4, *([float(r == rank) for r in range(4)] for rank in (1, 2, 3))]
    found = explain_step(measured(weights, equal(4)))
    assert [f.cause for f in found] == ["single-rank-gradient", "missing-division"]
    assert "only rank 0 holds the sum" in found[0].evidence
    assert "ranks 1, 2, 3 the local gradient" in found[0].evidence


def collinear(factor: float) -> StepFacts:
    """Ranks' gradients are 1, 2, 3 and 4 times the same, and so much of it is held everywhere."""
    step = measured([equal(4)] * 4, equal(4))
    rows = (tuple(float(r + 1) for r in range(4)), *((0.0,) * 4 for _ in range(3)))
    changed = {
        "norms": (1.0, 2.0, 3.0, 4.0), "basis": rows, "projected": ((factor, 0.0, 0.0, 0.0),) * 4,
        "remainder": (0.0,) * 4, "wrong": (0, 1, 2, 3), "of_mean": (0,) * 4, "of_own": (0,) * 4,
        "of_either": (0,) * 4,
    }  # fmt: skip
    parameters = tuple(msgspec.structs.replace(p, **changed) for p in step.parameters)
    fits = tuple(msgspec.structs.replace(fit, identified=False) for fit in step.fits)
    return msgspec.structs.replace(step, parameters=parameters, fits=fits)


def test_no_weights_are_invented_where_gradients_are_multiples_of_each_other() -> None:
    step = collinear(3.4437)  # -1.377 times any of them would be as true
    assert not explain_step(step)
    text = gradients.describe_unexplained(Measurements(world=4, steps=(step,)))
    assert "multiples of each other" in text
    assert "have weights" not in text.partition("cannot be measured")[0].partition("multiples")[0]
    assert {f.cause for f in explain_step(collinear(10.0))} == {"missing-division"}


def together(first: StepFacts, second: StepFacts) -> StepFacts:
    """Parameters that went wrong in two ways."""
    return msgspec.structs.replace(first, parameters=first.parameters + second.parameters)


def test_what_explains_most_of_the_error_comes_first() -> None:
    """The smaller mistake is in the first parameter, the larger one in the last."""
    turned = [[-0.25] * 4] * 4
    slight = [[0.25 * 1.001] * 4] * 4
    small_first = together(
        measured(slight, equal(4), only=(0,)), measured(turned, equal(4), only=(2,))
    )
    small_last = together(
        measured(turned, equal(4), only=(0,)), measured(slight, equal(4), only=(2,))
    )
    for step in (small_first, small_last):
        found = explain_step(step)
        assert [f.cause for f in found] == ["wrong-sign", "wrong-divisor"]
        assert "(100% of the error)" in found[0].evidence


def test_local_gradients_are_consulted_before_an_exchange_is_accused() -> None:
    """Every rank was given rank 0's samples: no rank is left out of the exchange."""
    step = measured([[1.0, 0.0, 0.0, 0.0]] * 4, equal(4))
    assert causes(step) == {"single-rank-gradient"}
    left = tuple(
        LocalGradientFacts(rank=rank, parameters=("p0", "p1", "p2"), distance=1.4, source=0)
        for rank in (1, 2, 3)
    )
    seen = msgspec.structs.replace(
        step, left=left, left_factors=(1.0, None, None, None), mean_of_left=True
    )
    (found,) = explain_step(seen)
    assert found.cause == "wrong-local-gradient"
    assert "as if all ranks had rank 0's samples" in found.evidence
    assert "the all-reduce is right" in found.evidence
    of_buffers = [msgspec.structs.replace(one, buffers=("mask",)) for one in left]
    (found,) = explain_step(msgspec.structs.replace(seen, left=tuple(of_buffers)))
    assert found.cause == "buffers-differ"
    assert found.evidence.endswith("promised ones: 'mask'")
    both = msgspec.structs.replace(seen, mean_of_left=False)
    assert [f.cause for f in explain_step(both)] == ["wrong-local-gradient", "single-rank-gradient"]


def test_a_loss_that_all_ranks_scale_alike_stays_a_matter_of_scale() -> None:
    step = measured([[1.0] * 4] * 4, equal(4))
    left = tuple(
        LocalGradientFacts(rank=rank, parameters=("p0", "p1", "p2"), distance=3.0)
        for rank in range(4)
    )
    scaled = msgspec.structs.replace(step, left=left, left_factors=(4.0,) * 4, mean_of_left=True)
    assert causes(scaled) == {"missing-division"}


def with_matches(step: StepFacts, pairs: dict[str, str]) -> StepFacts:
    return msgspec.structs.replace(
        step,
        matches=tuple(
            GradientMatch(
                kind="parameter", rank=rank, parameter=one, other=other, distance=0.0, bound=1.0
            )
            for one, other in pairs.items()
            for rank in range(4)
        ),
    )


def test_a_shared_bucket_is_no_wrong_order() -> None:
    mixed = [[0.11, 0.33, 0.52, 0.21]] * 4
    swapped = with_matches(measured(mixed, equal(4), only=(0, 2)), {"p0": "p2", "p2": "p0"})
    assert causes(swapped) == {"wrong-parameter-order"}
    overwritten = with_matches(measured(mixed, equal(4), only=(0,)), {"p0": "p2"})
    assert causes(overwritten) == {"bucket-reused-in-flight"}
    third = with_matches(measured(mixed, equal(4), only=(0, 2)), {"p0": "p1", "p2": "p1"})
    assert causes(third) == {"bucket-reused-in-flight"}


def noisy(*, on_grid: bool = False, of_terms: bool = False) -> StepFacts:
    step = measured([equal(4)] * 4, equal(4))
    parameters = [
        msgspec.structs.replace(
            p, wrong=(0, 1, 2, 3), shorter=("float16",) * 4, on_grid=(on_grid,) * 4,
            of_terms=(of_terms,) * 4, remainder=(1e-4 * max(p.norms),) * 4, of_mean=(0,) * 4,
            of_either=(0,) * 4,
        )
        for p in step.parameters
        if p.elements >= 16
    ]  # fmt: skip
    return msgspec.structs.replace(step, parameters=tuple(parameters))


def test_noise_is_not_float16_alone() -> None:
    assert causes(noisy()) == {"low-precision", "noise"}
    assert causes(noisy(on_grid=True)) == {"low-precision"}
    assert causes(noisy(of_terms=True)) == {"low-precision"}


def test_a_few_short_parameters_have_enough_elements_together() -> None:
    step = noisy(on_grid=True)
    short = [msgspec.structs.replace(p, elements=8, name=str(n)) for n in range(2) for p in
             step.parameters[:1]]  # fmt: skip
    assert causes(msgspec.structs.replace(step, parameters=tuple(short))) == {"low-precision"}
    (alone,) = short[:1]
    found = causes(msgspec.structs.replace(step, parameters=(alone,)))
    assert found == {"low-precision", "noise"}, "8 elements may be numbers of float16 by chance"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("zero", "partial-sync"), ("own / W", "partial-sync"), ("sum", "missing-division"),
        ("any rank's", "single-rank-gradient"),
    ],
)  # fmt: skip
def test_elements_of_one_other_kind(kind: str, cause: str) -> None:
    mixed = [[0.11, 0.33, 0.52, 0.21]] * 4
    step = measured(mixed, equal(4))

    def half(p: ParameterFacts, missing: int) -> ParameterFacts:
        return msgspec.structs.replace(
            p, of_mean=(p.elements // 2,) * 4, of_own=(0,) * 4, of_either=(p.elements // 2,) * 4,
            kinds=((kind, (p.elements - missing,) * 4),),
        )  # fmt: skip

    for missing in (0, 1):
        parameters = tuple(half(p, missing) for p in step.parameters)
        found = causes(msgspec.structs.replace(step, parameters=parameters))
        assert found == (set() if missing else {cause})


def right(**changed: object) -> StepFacts:
    step = msgspec.structs.replace(measured([equal(4)] * 4, equal(4)), parameters=())
    return msgspec.structs.replace(step, **changed)  # type: ignore[arg-type]


def test_parameters_that_stay_nan_are_not_an_optimizer_that_was_not_stepped() -> None:
    bad = NonFiniteGradient(rank=0, parameter="p0", count=1, before=())
    stays = right(step=1, unchanged=(0, 1, 2, 3))
    for first, expected in (
        (right(), "optimizer-not-stepped"),
        (right(not_finite=bad), "nonfinite"),
    ):
        facts = Measurements(world=4, steps=(first, stays))
        assert named([failed("gradients", "rounding"), failed("parameters")], facts) == [expected]


def test_bits_have_names() -> None:
    facts = Measurements(world=4, steps=(right(),), other_order="RankOrder with divide-after")
    assert named([failed("gradients", "bitwise")], facts) == ["not-as-promised"]
    apart = Measurements(world=4, steps=(right(alike=((0, 1), (2, 3))),))
    assert named([failed("agreement")], apart) == ["replicas-not-bit-identical"]


def test_passes_that_do_not_count_alike() -> None:
    step = measured([[0.11, 0.33, 0.52, 0.21]] * 4, equal(4))
    first_only = tuple(tuple((0.25, 0.0) for _ in range(4)) for _ in range(4))
    alike = tuple(tuple((0.5, 0.5) for _ in range(4)) for _ in range(4))
    for weights, cause in ((first_only, "lost-micro-batch"), (alike, "unexplained")):
        passes = PassFacts(step=0, passes=2, weights=weights)
        facts = Measurements(world=4, steps=(step,), passes=passes)
        assert named([failed("gradients", "rounding")], facts) == [cause]


def test_an_update_is_described_and_said_beside_a_gradient() -> None:
    update = UpdateFacts(
        step=2, ranks=(0, 1, 2, 3), parameters=("p0",), state=(), factor=1.0, decay=-0.001,
        rest=1e-9, unchanged=False,
    )  # fmt: skip
    facts = Measurements(world=4, steps=(right(),), update=update)
    (found,) = diagnose(ENDS, [failed("parameters", "bitwise")], facts)
    assert found.cause == "wrong-update"
    assert "0.001 of each was subtracted from it" in found.evidence
    wrong = measured([[1.0] * 4] * 4, equal(4))
    facts = msgspec.structs.replace(facts, steps=(wrong,))
    both = named([failed("gradients", "rounding"), failed("parameters", "bitwise")], facts)
    assert both == ["missing-division", "wrong-update"]


def test_averages_of_parameters_are_no_missing_exchange() -> None:
    own = [[float(r == rank) for r in range(4)] for rank in range(4)]
    facts = Measurements(world=4, steps=(measured(own, equal(4)),), design="local-sgd:1")
    (found,) = diagnose(
        ENDS, [failed("gradients", "rounding"), failed("parameters", "bitwise")], facts
    )
    assert found.cause == "model-averaging"
    assert "--accept local-sgd:1" in found.suggestion


def test_a_broadcast_is_not_advised_where_ranks_begin_alike() -> None:
    results = [failed("initial state")]
    (apart,) = diagnose(ENDS, results, Measurements(world=4))
    (alike,) = diagnose(ENDS, results, Measurements(world=4, begins_alike=True))
    assert apart.cause == alike.cause == "initial-state-differs"
    assert "broadcast" in apart.suggestion
    assert "broadcast" not in alike.suggestion


def test_only_the_loss_is_wrong() -> None:
    assert named([failed("loss", "bitwise")]) == ["wrong-loss"]
