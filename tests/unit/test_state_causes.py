"""Causes beside the gradients, and what stands beside causes in them."""

from distcheck.diagnosis import diagnose
from distcheck.diagnosis.facts import Facts, Overlap
from distcheck.records import CheckResult, Diagnosis, Difference
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
    assert named([failed("buffers", "X")]) == ["buffers-differ"]
    same = Overlap(ranks=(0, 1), shared=8, read=8, whole_steps=True)
    some = Overlap(ranks=(0, 1), shared=3, read=8, whole_steps=False)
    assert named([failed("data")], Facts(world=4, overlaps=(same, some))) == ["same-data"]
    assert named([failed("data")], Facts(world=4, overlaps=(some,))) == ["overlapping-data"]
    assert named([failed("data")], Facts(world=4)) == ["unexplained"]


def test_gradients_that_were_others_in_the_second_run_raced() -> None:
    """By more than roundings, and not after they had gone wrong alike."""

    def found(rerun: CheckResult, *more: CheckResult) -> list[Diagnosis]:
        wrong = measured([[1.0] * 4] * 4, equal(4))
        results = [failed("gradients", "R"), rerun, *more]
        return diagnose(ENDS, results, Facts(world=4, steps=(wrong,)))

    raced = differing("w (gradient)", 1.0, 0.5)
    first, second = found(raced)
    assert [first.cause, second.cause] == ["nondeterministic", "missing-division"]
    assert "asynchronous collective that nobody waits for" in first.suggestion
    assert "changed them after it had returned" not in first.evidence
    assert "in the first run; the second held other gradients there" in second.evidence
    first = found(raced, failed("parameters", "X"))[0]
    assert "changed them after it had returned" in first.evidence
    for rerun in (
        differing("w (gradient)", 1.0, 1.0 + 1e-5), differing("w (gradient)", 1.0, 0.5, step=3),
        differing("w (local gradient)", 1.0, 0.5), differing("w (parameter)", 1.0, 0.5),
    ):  # fmt: skip
        first, second = found(rerun)
        assert [first.cause, second.cause] == ["missing-division", "nondeterministic"]
        assert "first run" not in first.evidence
        assert "nobody waits" not in second.suggestion


def test_randomness_is_named_beside_what_failed() -> None:
    facts = Facts(world=4, same_randomness=((0, 1, 2, 3),))
    assert named([failed("rerun")], facts) == ["nondeterministic", "same-randomness"]
    assert named([], facts) == []
