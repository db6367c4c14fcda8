"""From what ranks and judges left behind to a verdict; no process is started."""

from typing import Any

import msgspec
import pytest

from distcheck.contract import Contract
from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import (
    Case,
    CaseReport,
    CheckResult,
    Compared,
    Difference,
    FindingKind,
    ModelLayout,
    Outcome,
    PlannedCheck,
)
from distcheck.records.layers import NO_OUTPUTS
from distcheck.training.jobs import CaseFacts
from distcheck.verification.case_run import CaseRun
from distcheck.verification.verdicts import build_case_report, machine_differences
from distcheck.workloads.cells import CELLS
from distcheck.worlds.surroundings import separate

FACTS = CaseFacts(
    contract=Contract(), strategy_file="s.py", strategy_line=3,
    model=ModelLayout(parameters=(), buffers=(), optimizer=()), train_size=1000,
    saved_bytes_per_sample=0, own_sampler=False, draws_random_numbers=False,
)  # fmt: skip
REQUIRED = Compared(tensors=2, elements=10, ranks=2, steps=3)
FINISHED = [Outcome(rank=0, outcome="finished"), Outcome(rank=1, outcome="finished")]
HUNG = [Outcome(rank=1, outcome="hung", text="in sync"), Outcome(rank=0, outcome="finished")]
OUTCOME = PlannedCheck(check="outcome", layer="-", scope="front", required=Compared(ranks=2))
GRADIENTS = PlannedCheck(check="gradients", layer="bitwise", scope="step", required=REQUIRED)
PARAMETERS = PlannedCheck(check="parameters", layer="bitwise", scope="step", required=REQUIRED)
LOSS = PlannedCheck(check="loss", layer="full batch float32", scope="step", required=REQUIRED)


def result(
    planned: PlannedCheck, verdict: str = "pass", *, at: int | None = None, **said: Any
) -> CheckResult:
    first = None
    if at is not None:
        first = Difference(step=at, rank=0, parameter="w", index=(0,), actual=1.0, expected=2.0,
                           error=1.0, bound=0.0)  # fmt: skip
    return CheckResult(
        check=planned.check, layer=planned.layer, verdict=verdict, first=first,
        **{"compared": REQUIRED, **said},
    )  # fmt: skip


def run(planned: list[PlannedCheck], results: list[CheckResult], **given: Any) -> CaseReport:
    about = {"workload": "mlp", "accept": None, "steps": 3}
    about |= {name: given.pop(name) for name in about if name in given}
    case = Case(id="one", strategy="s", world=2, **about)
    elsewhere = given.pop("elsewhere", "")
    seen = given.pop("seen", None)
    layout = TraceLayout(world=2, steps=case.steps, max_shard=1, model=FACTS.model)
    ends = {
        name: tuple(given.pop(name)) for name in ("outcomes", "rerun_outcomes") if name in given
    }
    made = CaseRun(
        case=case, facts=given.pop("facts", FACTS), planned=tuple(planned), layout=layout,
        notes=("a note",), results=list(results), seen=seen, timings_s={"judging": 1.23456},
        **{"outcomes": tuple(FINISHED), **ends, **given},
    )  # fmt: skip
    return build_case_report(made, replay="distcheck replay one", elsewhere=elsewhere)


def checks(report: CaseReport) -> dict[str, tuple[str, str]]:
    return {c.check: (c.verdict, c.reason) for c in report.checks}


def test_everything_owed_and_compared_passes() -> None:
    report = run([OUTCOME, GRADIENTS], [result(GRADIENTS)])
    assert report.verdict == "pass"
    assert checks(report) == {"outcome": ("pass", ""), "gradients": ("pass", "")}
    assert (report.strategy_file, report.strategy_line) == ("s.py", 3)
    assert (report.timings_s, report.notes) == ({"judging": 1.235}, ("a note",))
    assert report.replay == "distcheck replay one"


@pytest.mark.parametrize("fewer", ["tensors", "elements", "ranks", "steps"])
def test_a_pass_that_compared_less_than_it_owes_is_unknown(fewer: str) -> None:
    less = msgspec.structs.replace(REQUIRED, **{fewer: getattr(REQUIRED, fewer) - 1})
    report = run([OUTCOME, GRADIENTS], [result(GRADIENTS, compared=less)])
    assert report.verdict == "unknown"
    have, want = getattr(less, fewer), getattr(REQUIRED, fewer)
    assert checks(report)["gradients"] == ("unknown", f"compared only {have} of {want} {fewer}")


@pytest.mark.parametrize(
    ("outcomes", "verdict", "reason"),
    [
        ([], "unknown", "not judged: interrupted"),
        (HUNG, "fail", "not judged: the ranks finished no step"),
        (FINISHED, "unknown", "not judged"),
    ],
)
def test_an_unjudged_check_is_unknown(outcomes: list[Outcome], verdict: str, reason: str) -> None:
    report = run([OUTCOME, GRADIENTS], [], outcomes=outcomes)
    assert (report.verdict, checks(report)["gradients"]) == (verdict, ("unknown", reason))


def test_what_a_hang_kept_from_running_says_so_after_an_interruption_too() -> None:
    why = "not run: the strategy hung in exact"
    report = run([OUTCOME, GRADIENTS], [], outcomes=[], not_run=why)
    assert report.verdict == "unknown"
    assert checks(report) == {"outcome": ("unknown", why), "gradients": ("unknown", why)}


def test_ranks_that_did_not_finish_fail_the_outcome() -> None:
    report = run([OUTCOME], [], outcomes=HUNG)
    assert checks(report)["outcome"] == ("fail", "rank 1 hung")
    assert report.checks[0].compared.ranks == 2
    one = run([OUTCOME], [], outcomes=FINISHED[:1])
    assert checks(one)["outcome"] == ("unknown", "compared only 1 of 2 ranks")


def test_outcomes_are_of_the_run_that_failed() -> None:
    report = run([OUTCOME], [], rerun_outcomes=HUNG)
    assert checks(report)["outcome"] == ("fail", "rank 1 hung")
    assert [o.detail for o in report.outcomes] == ["in the rerun: in sync", ""]
    fine = run([OUTCOME], [], rerun_outcomes=FINISHED)
    assert [o.detail for o in fine.outcomes] == ["", ""]
    first = run([OUTCOME], [], outcomes=HUNG, rerun_outcomes=FINISHED)
    assert checks(first)["outcome"] == ("fail", "rank 1 hung")


RERUN = PlannedCheck(check="rerun", layer="-", scope="run", required=REQUIRED)


def test_a_rerun_says_where_it_was() -> None:
    said = {"rerun_in": "in separate interpreters: ...", "surroundings": separate(0, delayed=True)}
    report = run([OUTCOME, RERUN], [result(RERUN)], **said)
    assert checks(report)["rerun"] == ("pass", "in separate interpreters: ...")
    report = run([OUTCOME, RERUN], [result(RERUN)], rerun_outcomes=HUNG, **said)
    assert report.outcomes[0].detail == "in the rerun in separate interpreters: in sync"


def test_other_roundings_on_other_machines_pass_and_are_said() -> None:
    machines = BisectionResult(depends=True, factors=("nodes",), worlds=6, harmless=True)
    failing = result(RERUN, "fail", at=1)
    report = run([OUTCOME, RERUN], [failing], separation=machines, rerun_in="in two")
    assert (report.verdict, report.diagnosis) == ("pass", ())
    assert checks(report)["rerun"][1] == (
        "in two; there the bits differ, caused only by nodes, and every check passes as well"
    )
    wrong = msgspec.structs.replace(machines, harmless=False)
    report = run([OUTCOME, RERUN], [failing], separation=wrong)
    assert [found.cause for found in report.diagnosis] == ["depends-on-process-state"]


def test_parts_of_one_check_are_put_together() -> None:
    half = Compared(tensors=2, elements=5, ranks=2, steps=1)
    rest = Compared(tensors=2, elements=5, ranks=2, steps=2)
    parts = [result(GRADIENTS, compared=half), result(GRADIENTS, compared=rest)]
    assert run([GRADIENTS], parts).verdict == "pass"
    late = result(GRADIENTS, "fail", at=2, compared=rest)
    early = result(GRADIENTS, "fail", at=1, compared=half)
    (found,) = run([GRADIENTS], [late, early]).checks
    assert found.verdict == "fail"
    assert found.first is not None
    assert found.first.step == 1


def test_a_later_failure_is_said_to_follow_and_an_equally_early_one_is_not() -> None:
    results = [
        result(PARAMETERS, "fail", at=1), result(GRADIENTS, "fail", at=0),
        result(LOSS, "fail", at=0),
    ]  # fmt: skip
    found = checks(run([PARAMETERS, GRADIENTS, LOSS], results))
    assert found == {
        "parameters": ("fail",
            "begins after gradients had diverged at step 0, and may follow from it"),
        "gradients": ("fail", ""),
        "loss": ("fail", ""),
    }  # fmt: skip


def test_what_passed_or_has_no_place_follows_from_nothing() -> None:
    results = [
        result(GRADIENTS, "fail", at=0), result(PARAMETERS, "pass"), result(LOSS, "fail")
    ]  # fmt: skip
    reasons = [c.reason for c in run([GRADIENTS, PARAMETERS, LOSS], results).checks]
    assert reasons == ["", "", ""]
    placeless = run([LOSS, PARAMETERS], [result(LOSS, "fail"), result(PARAMETERS)])
    assert [c.reason for c in placeless.checks] == ["", ""]


def test_exact_trains_on_so_that_the_same_step_may_follow() -> None:
    gradients = msgspec.structs.replace(GRADIENTS, layer="exact")
    parameters = msgspec.structs.replace(PARAMETERS, layer="exact")
    found = checks(
        run([gradients, parameters],
            [result(gradients, "fail", at=1), result(parameters, "fail", at=1)])
    )  # fmt: skip
    assert "may follow" in found["parameters"][1]
    assert found["gradients"][1] == ""
    mixed = run([gradients, PARAMETERS],
                [result(gradients, "fail", at=1), result(PARAMETERS, "fail", at=1)])  # fmt: skip
    assert [c.reason for c in mixed.checks] == ["", ""]


def test_a_note_of_the_plan_is_said_with_the_result() -> None:
    noted = msgspec.structs.replace(GRADIENTS, note="widened")
    report = run([noted], [result(GRADIENTS, "fail", at=0, reason="beyond")])
    assert checks(report)["gradients"] == ("fail", "widened; beyond")


def test_a_failed_cell_says_what_it_is_about() -> None:
    cell = sorted(CELLS)[0]
    failed = run([GRADIENTS], [result(GRADIENTS, "fail", at=0)], workload=cell)
    assert failed.notes[1:] == (
        f"{cell} is a cell: {CELLS[cell].about}; if your code does not need to support this, "
        f"pass --without {cell} or decline it in the contract",
    )
    assert run([GRADIENTS], [result(GRADIENTS)], workload=cell).notes == ("a note",)
    assert run([GRADIENTS], [result(GRADIENTS, "fail", at=0)]).notes == ("a note",)


def test_a_low_rank_exchange_that_never_was_one_is_unknown() -> None:
    bounded = msgspec.structs.replace(GRADIENTS, layer="rounding")

    def ends(accept: str | None, reason: str) -> tuple[str, str]:
        kinds = (FindingKind.COMPRESSED,) if reason else ()
        report = run([bounded], [result(bounded, reason=reason, kinds=kinds)], accept=accept)
        return checks(report)["gradients"]

    compressed = "step 1: 2 of 8 tensors were compressed, 9 to 12 % of their norm kept"
    assert ends("low-rank:2", compressed) == ("pass", compressed)
    for accept in (None, "low-precision:bfloat16", "quantized:8"):
        assert ends(accept, "") == ("pass", "")
    verdict, reason = ends("low-rank:2", "")
    assert (verdict, reason.partition(":")[0]) == (
        "unknown", "no tensor was compressed in any of 3 steps"
    )  # fmt: skip


HERE = {"torch": "2", "cpu": "one", "cpu_capability": "AVX2", "threads": 1, "mkldnn": True}


@pytest.mark.parametrize(
    ("name", "there"), [("cpu", "two"), ("threads", 2), ("gpu", "one"), ("cudnn", 9)]
)
def test_what_bits_depend_on_is_said_where_it_differs(name: str, there: object) -> None:
    note = f"recorded elsewhere ({name} {there} there, {HERE.get(name)} here): results"
    whole = f"{note} computed here may not be bit-identical"
    assert machine_differences({**HERE, name: there}, HERE) == whole
    assert not machine_differences(dict(HERE), dict(HERE))
    assert not machine_differences({**HERE, "python": "4"}, HERE)


@pytest.mark.parametrize(
    ("compared", "verdict", "there"),
    [(Compared(), "pass", False), (Compared(tensors=1, elements=1), "unknown", True)],
)
def test_missing_outputs_are_a_note(compared: Compared, verdict: str, there: bool) -> None:
    outputs = PlannedCheck(
        check="outputs", layer="full batch float32", scope="step", required=REQUIRED
    )
    kinds = (FindingKind.NO_OUTPUTS,)
    empty = result(outputs, compared=compared, reason=NO_OUTPUTS, kinds=kinds)
    made = [empty, result(GRADIENTS)]
    report = run([OUTCOME, outputs, GRADIENTS], made)
    assert report.verdict == verdict
    assert ("outputs" in checks(report)) == there
    assert (NO_OUTPUTS in report.notes) == (not there)


def test_bits_of_another_machine_are_unknown_and_what_needs_none_is_not() -> None:
    initial = PlannedCheck(check="initial state", layer="-", scope="step", required=REQUIRED)
    bounded = msgspec.structs.replace(GRADIENTS, layer="rounding")
    agreement = PlannedCheck(check="agreement", layer="-", scope="step", required=REQUIRED)
    planned = [initial, GRADIENTS, PARAMETERS, bounded, LOSS, agreement]
    results = [
        result(p, "pass" if p is PARAMETERS else "fail", at=None if p is PARAMETERS else 0)
        for p in planned
    ]

    def verdicts(report: CaseReport) -> list[str]:
        return [c.verdict for c in report.checks]

    here = run(planned, results)
    assert verdicts(here) == ["fail", "fail", "pass", "fail", "fail", "fail"]
    assert [d.cause for d in here.diagnosis] == ["initial-state-differs"]
    other = run(planned, results, elsewhere="recorded elsewhere")
    assert verdicts(other) == ["unknown", "unknown", "pass", "unknown", "fail", "fail"]
    assert {c.reason for c in other.checks if c.verdict == "unknown"} == {"recorded elsewhere"}
    assert (other.verdict, other.notes[-1]) == ("fail", "recorded elsewhere")
    assert "initial-state-differs" not in [d.cause for d in other.diagnosis]
    bits = run(planned[:4], results[:4], elsewhere="recorded elsewhere")
    assert (bits.verdict, bits.diagnosis) == ("unknown", ())
