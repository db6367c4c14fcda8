"""Causes beside the gradients, and what stands beside causes in them."""

from distcheck.judge.diagnosis import diagnose
from distcheck.judge.diagnosis.measurements import Measurements, SampleOverlap
from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.records import CheckResult, Diagnosis, Difference, Outcome
from tests.unit.test_diagnosis import ENDS, equal, failed, measured, named


def differing(parameter: str, once: float, twice: float, *, step: int = 2) -> CheckResult:
    """What two runs of a case recorded."""
    place = Difference(
        parameter=parameter, rank=1, step=step, index=(), actual=twice, expected=once,
        error=abs(once - twice), bound=0.0,
    )  # fmt: skip
    return CheckResult(check="rerun", layer="-", verdict="fail", first=place, worst=place)


def test_state_causes() -> None:
    assert named([failed("rerun")]) == ["nondeterministic"]
    assert named([failed("initial state")]) == ["initial-state-differs"]
    assert named([failed("buffers", "bitwise")]) == ["buffers-differ"]
    same = SampleOverlap(ranks=(0, 1), shared=8, read=8, whole_steps=True)
    some = SampleOverlap(ranks=(0, 1), shared=3, read=8, whole_steps=False)
    assert named([failed("data")], Measurements(world=4, overlaps=(same, some))) == ["same-data"]
    assert named([failed("data")], Measurements(world=4, overlaps=(some,))) == ["overlapping-data"]
    assert named([failed("data")], Measurements(world=4)) == ["unexplained"]


def test_gradients_that_were_others_in_the_second_run_raced() -> None:
    """By more than roundings, and not after they had gone wrong alike."""

    def found(rerun: CheckResult, *more: CheckResult) -> list[Diagnosis]:
        wrong = measured([[1.0] * 4] * 4, equal(4))
        results = [failed("gradients", "rounding"), rerun, *more]
        return diagnose(ENDS, results, Measurements(world=4, steps=(wrong,)))

    raced = differing("w (gradient)", 1.0, 0.5)
    first, second = found(raced)
    assert [first.cause, second.cause] == ["nondeterministic", "missing-division"]
    assert "asynchronous collective that is not waited on" in first.suggestion
    assert "modified after the all-reduce returned" not in first.evidence
    assert "in the first run; the gradients of the second run differ there" in second.evidence
    first = found(raced, failed("parameters", "bitwise"))[0]
    assert "modified after the all-reduce returned" in first.evidence
    for rerun in (
        differing("w (gradient)", 1.0, 1.0 + 1e-5), differing("w (gradient)", 1.0, 0.5, step=3),
        differing("w (local gradient)", 1.0, 0.5), differing("w (parameter)", 1.0, 0.5),
    ):  # fmt: skip
        first, second = found(rerun)
        assert [first.cause, second.cause] == ["missing-division", "nondeterministic"]
        assert "first run" not in first.evidence
        assert "not waited" not in second.suggestion


def test_what_no_order_of_the_same_parts_gives_raced_however_small_it_is() -> None:
    wrong = measured([[1.0] * 4] * 4, equal(4))
    place = Difference(
        parameter="w", rank=1, step=2, index=(), actual=4.0, expected=1.0, error=3.0, bound=1e-7
    )
    gradients = CheckResult(
        check="gradients", layer="rounding", verdict="fail", first=place, worst=place
    )
    # Four times the mean may be four bounds from itself by its order, and twice that between runs.
    for twice, cause in (
        (1.0 + 1e-5, "nondeterministic"), (1.0 + 1e-7, "missing-division"),
        (1.0 + 7e-7, "missing-division"), (1.0 + 9e-7, "nondeterministic"),
    ):  # fmt: skip
        results = [gradients, differing("w (gradient)", 1.0, twice)]
        assert diagnose(ENDS, results, Measurements(world=4, steps=(wrong,)))[0].cause == cause


def test_randomness_is_named_beside_what_failed() -> None:
    facts = Measurements(world=4, same_randomness=((0, 1, 2, 3),))
    assert named([failed("rerun")], facts) == ["nondeterministic", "shared-rng-seed"]
    assert named([], facts) == []


def test_process_state_is_named_where_further_worlds_have_shown_it() -> None:
    rerun = differing("w (gradient)", 1.0, 0.5)
    lines = ("sync.py:3 iterates over a set: for x in s:",)
    shown = BisectionResult(depends=True, factors=("interpreters",), worlds=10, lines=lines)
    (cause,) = diagnose(ENDS, [rerun], None, shown)
    assert cause.cause == "depends-on-process-state"
    assert cause.evidence.startswith("the first world, in which ranks share their process state,")
    for part in ("step 2, w (gradient), rank 1", "PYTHONHASHSEED", "10 more worlds", *lines):
        assert part in cause.evidence
    assert "sorted(...)" in cause.suggestion
    machines = BisectionResult(depends=True, factors=("nodes",), worlds=6)
    (cause,) = diagnose(ENDS, [rerun], None, machines)
    assert "no line that reads such state was found" in cause.evidence
    assert "dist.get_rank()" in cause.suggestion
    together = BisectionResult(depends=True, factors=("nodes", "memory"), worlds=10)
    (cause,) = diagnose(ENDS, [rerun], None, together)
    assert "no single factor" in cause.evidence


def test_a_race_is_no_process_state() -> None:
    rerun = differing("w (gradient)", 1.0, 0.5)
    lines = ("sync.py:3 reads a memory address: sorted(ps, key=id)",)
    (cause,) = diagnose(ENDS, [rerun], None, BisectionResult(depends=False, worlds=1, lines=lines))
    assert cause.cause == "nondeterministic"
    assert lines[0] in cause.evidence
    late = BisectionResult(depends=False, factors=("delays",), worlds=2)
    (cause,) = diagnose(ENDS, [rerun], None, late)
    assert cause.cause == "nondeterministic"
    assert "ranks delayed by some milliseconds" in cause.evidence
    assert "asynchronous collective that is not waited on" in cause.suggestion


def test_process_state_comes_before_how_it_ended_and_after_what_was_wrong_anyway() -> None:
    shown = BisectionResult(depends=True, factors=("nodes",), worlds=6)
    ends = [Outcome(rank=0, outcome="raised", text="ValueError"), *ENDS[1:]]
    causes = [d.cause for d in diagnose(ends, [failed("outcome")], None, shown)]
    assert causes == ["depends-on-process-state", "crash"]
    both = [failed("outcome"), failed("rerun")]
    causes = [d.cause for d in diagnose(ends, both, None, shown)]
    assert causes == ["depends-on-process-state", "crash"]
    wrong = measured([[1.0] * 4] * 4, equal(4))
    results = [failed("gradients", "rounding"), differing("w (gradient)", 1.0, 0.5)]
    found = diagnose(ENDS, results, Measurements(world=4, steps=(wrong,)), shown)
    assert [d.cause for d in found] == ["missing-division", "depends-on-process-state"]
    assert "passed every check" not in found[1].evidence
    assert "in the first run" not in found[0].evidence
