"""Results of checks: compared with the required coverage, merged, and put into a report."""

import msgspec
import pytest

from distcheck.errors import ExitCode, VerdictError
from distcheck.judge.checks.merging import earliest_failure, merge_results, require_coverage
from distcheck.records import (
    CaseReport,
    CheckResult,
    Compared,
    Difference,
    Outcome,
    Report,
    merge_verdicts,
)
from tests.unit.test_plan import cases


def result(verdict: str = "pass", **options: object) -> CheckResult:
    return msgspec.convert(
        {"check": "gradients", "layer": "rounding", "verdict": verdict, **options}, CheckResult
    )


FULL = Compared(tensors=1, elements=120, ranks=4, steps=3)


@pytest.mark.parametrize("field", ["tensors", "elements", "ranks", "steps"])
def test_less_than_owed_is_unknown(field: str) -> None:
    less = msgspec.structs.replace(FULL, **{field: getattr(FULL, field) - 1})
    held = require_coverage(result(compared=msgspec.to_builtins(less)), FULL)
    assert held.verdict == "unknown"
    assert field in held.reason


def test_all_that_is_owed_passes_and_a_failure_stays_one() -> None:
    assert require_coverage(result(compared=msgspec.to_builtins(FULL)), FULL).verdict == "pass"
    assert require_coverage(result("fail"), FULL).verdict == "fail"


def failing(check: str, step: int | None) -> CheckResult:
    place = Difference(
        parameter="w", rank=0, step=step or 0, index=(), actual=1.0, expected=2.0, error=1.0,
        bound=0.0,
    )  # fmt: skip
    return CheckResult(
        check=check, layer="bitwise", verdict="fail", compared=FULL,
        first=place if step is not None else None,
    )  # fmt: skip


def test_the_first_divergence_is_that_of_the_first_step_then_of_the_first_check() -> None:
    consequence, cause = failing("local gradients", 1), failing("gradients", 0)
    assert earliest_failure([result(), consequence, cause, failing("loss", 0)]) is cause
    assert earliest_failure([failing("data", None), consequence]) is consequence
    assert earliest_failure([result()]) is None


def test_results_of_steps_add_up() -> None:
    def part(step: int, verdict: str, error: float) -> CheckResult:
        place = Difference(
            parameter="w", rank=0, step=step, index=(1,), actual=1.0, expected=1.0,
            error=error, bound=1.0,
        )  # fmt: skip
        return CheckResult(
            check="gradients", layer="rounding", verdict="fail" if verdict == "fail" else "pass",
            compared=Compared(tensors=2, elements=10, ranks=4, steps=1), worst=place,
            first=place if verdict == "fail" else None,
        )  # fmt: skip

    merged = merge_results([part(0, "pass", 0.1), part(1, "fail", 2.0), part(2, "fail", 9.0)])
    assert merged.verdict == "fail"
    assert merged.compared == Compared(tensors=2, elements=30, ranks=4, steps=3)
    assert merged.first is not None
    assert merged.worst is not None
    assert (merged.first.step, merged.worst.step) == (1, 2)


def test_verdicts_merge_as_pass_unknown_fail() -> None:
    assert merge_verdicts(["pass", "unknown", "pass"]) == "unknown"
    assert merge_verdicts(["fail", "unknown", "pass"]) == "fail"
    assert merge_verdicts(["pass"]) == "pass"
    assert merge_verdicts([]) == "unknown"


def report(*parts: tuple[str, str], **options: object) -> Report:
    (case, *_) = cases()
    made = [
        CaseReport(
            case=case,
            strategy_file="",
            verdict=verdict,  # type: ignore[arg-type]
            outcomes=(Outcome(rank=0, outcome=outcome),),  # type: ignore[arg-type]
            checks=(),
        )
        for verdict, outcome in parts
    ]
    return Report(environment={}, cases=tuple(made), **options)  # type: ignore[arg-type]


def test_exit_codes() -> None:
    passed, failed = ("pass", "finished"), ("fail", "finished")
    crashed, unknown = ("fail", "raised"), ("unknown", "finished")
    assert report(passed).exit_code is ExitCode.PASS
    assert report(passed, failed, unknown).exit_code is ExitCode.MISMATCH
    assert report(crashed, failed).exit_code is ExitCode.MISMATCH
    assert report(crashed, passed, unknown).exit_code is ExitCode.RANK_FAILED
    assert report(passed, unknown).exit_code is ExitCode.UNKNOWN
    assert report().exit_code is ExitCode.UNKNOWN
    assert report(passed, save_error="disk full").exit_code is ExitCode.CANNOT_RUN
    assert report(failed, save_error="disk full").exit_code is ExitCode.MISMATCH
    assert report(passed, interrupted=True).exit_code is ExitCode.INTERRUPTED


def test_raise_for_verdict() -> None:
    passed = report(("pass", "finished"))
    assert passed.raise_for_verdict() is passed
    with pytest.raises(VerdictError, match="FAIL") as caught:
        report(("fail", "finished")).raise_for_verdict()
    assert isinstance(caught.value, AssertionError)
    assert caught.value.exit_code is ExitCode.MISMATCH
