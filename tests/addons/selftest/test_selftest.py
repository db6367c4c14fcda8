"""What a self-test plans, how it judges, and what that comes to; no process is started."""

import json

import msgspec
import pytest
from rich.console import Console

from distcheck.addons.selftest import command
from distcheck.addons.selftest.command import check_place, plan_selftest, representative_mutants
from distcheck.addons.selftest.records import (
    ListedMutant,
    SelftestVerdict,
    Zoo,
    detection_counts,
    format_checks,
    judge_correct,
    judge_mutant,
    judge_named_causes,
)
from distcheck.addons.selftest.table import SelftestResults, format_totals, render, render_json
from distcheck.errors import CannotRunError, ExitCode, NotSimulatedError, UsageError
from distcheck.machine import devices
from distcheck.records import Case, CaseReport, CheckResult, Diagnosis, Report

R, S32, AGREE, RERUN = (
    ("gradients", "rounding"), ("gradients", "full batch float32"), ("agreement", "-"),
    ("rerun", "-"),
)  # fmt: skip


def planted(
    name: str, *caught: tuple[str, str], causes: tuple[str, ...] = ("missing-sync",)
) -> ListedMutant:
    asked = {"strategy": f"zoo.file:{name}", "world": 4}
    return ListedMutant(name=name, file="file", asked=asked, caught=caught, causes=causes)


def report(*failed: tuple[str, str], causes: tuple[str, ...] = (), unknown: bool = False) -> Report:
    checks = [CheckResult(check=c, layer=layer, verdict="fail") for c, layer in failed]
    checks.append(CheckResult(check="data", layer="-", verdict="unknown" if unknown else "pass"))
    verdict = "fail" if failed else "unknown" if unknown else "pass"
    named = tuple(Diagnosis(cause=c, evidence="seen", suggestion="mend") for c in causes)
    case = CaseReport(
        case=Case(id="one", strategy="s", world=2), strategy_file="", verdict=verdict, outcomes=(),
        checks=tuple(checks), diagnosis=named,
    )  # fmt: skip
    return Report(environment={"torch": "2"}, cases=(case,))


ZOO = Zoo(
    mutants=(
        planted("both", R, S32), planted("bits", R), planted("apart", R, AGREE),
        planted("again", RERUN),
    ),
    strategies=("allreduce", "ddp", "ring"),
    elsewhere=(("data_parallel", "needs device cuda"),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "allowed", "naming"),
    [
        ({"missing-sync"}, {"missing-sync"}, "right"),
        ({"missing-sync"}, {"missing-sync", "hang"}, "right"),
        ({"missing-sync", "hang"}, {"missing-sync"}, "wrong"),
        ({"missing-sync"}, {"unexplained"}, "wrong"),
        ({"unexplained"}, {"missing-sync"}, "unexplained"),
        (set(), {"missing-sync"}, "unexplained"),
    ],
)
def test_naming(found: set[str], allowed: set[str], naming: str) -> None:
    assert judge_named_causes(found, allowed) == naming


def test_a_mutant_is_caught_by_any_failure_and_missed_by_none() -> None:
    mutant = planted("one", R, S32)
    caught = judge_mutant(mutant, report(R, S32, causes=("missing-sync",)))
    assert (caught.verdict, caught.as_listed, caught.naming, caught.good) == (
        "caught", True, "right", True,
    )  # fmt: skip
    other = judge_mutant(mutant, report(R, causes=("hang",)))
    assert (other.verdict, other.as_listed, other.naming, other.good) == (
        "caught", False, "wrong", False,
    )  # fmt: skip
    assert "listed with gradients (rounding, full batch float32)" in other.detail
    nameless = judge_mutant(mutant, report(R, S32, causes=("unexplained",)))
    assert (nameless.naming, nameless.detail) == ("unexplained", "could be named missing-sync")
    missed = judge_mutant(mutant, report())
    assert (missed.verdict, missed.naming, missed.good) == ("missed", "-", False)
    assert judge_mutant(mutant, report(unknown=True)).verdict == "unknown"


def test_a_correct_case_that_fails_is_a_false_alarm() -> None:
    verdicts = [judge_correct(r.cases[0]).verdict for r in (report(), report(R))]
    assert verdicts == ["passed", "false positive"]
    assert judge_correct(report(unknown=True).cases[0]).verdict == "unknown"


def test_what_was_planned_and_not_run_is_unknown() -> None:
    rows = [judge_mutant(planted("one", R), report(R, causes=("missing-sync",)))]
    assert detection_counts(rows, planted=1, correct=0).exit_code is ExitCode.PASS
    assert detection_counts(rows, planted=2, correct=0).exit_code is ExitCode.UNKNOWN
    assert detection_counts(rows, planted=1, correct=1).exit_code is ExitCode.UNKNOWN
    assert detection_counts([], planted=0, correct=0).exit_code is ExitCode.UNKNOWN
    for bad in (
        judge_mutant(planted("two", R), report()),
        judge_mutant(planted("two", R), report(R, causes=("hang",))),
        judge_correct(report(R).cases[0]),
    ):
        assert detection_counts([*rows, bad], planted=5, correct=5).exit_code is ExitCode.MISMATCH


def test_correct_strategies_alone_can_pass() -> None:
    rows = [judge_correct(report().cases[0])]
    assert detection_counts(rows, planted=0, correct=1).exit_code is ExitCode.PASS


def test_a_case_that_cannot_be_run_is_told_and_neither_passed_nor_unknown() -> None:
    why = "its gradients may reach 979992 and float16 carries 65504"
    out = SelftestVerdict(
        kind="correct", name="ring-w3", file="ring", verdict="left out", detail=why
    )
    rows = (msgspec.structs.replace(judge_correct(report().cases[0]), file="ring"), out)
    counts = detection_counts(rows, planted=0, correct=2)
    assert (counts.passed, counts.left_out, counts.unknown) == (1, 1, 0)
    assert (counts.exit_code, out.good) == (ExitCode.PASS, True)
    assert detection_counts([out], planted=0, correct=1).exit_code is ExitCode.UNKNOWN
    found = SelftestResults(rows=rows, counts=counts, environment={}, seconds=1.0)
    assert f"          ring-w3 is excluded: {why}" in list(format_totals(found))
    console = Console(width=100)
    with console.capture() as screen:
        render(found, console)
    assert "passed  1 cases, 1 left out" in screen.get()


def test_representatives_cover_every_check_and_layer_with_the_narrowest() -> None:
    assert [m.name for m in representative_mutants(ZOO.mutants)] == ["both", "apart", "again"]
    assert representative_mutants(()) == ()


def test_plans_by_name() -> None:
    plan = plan_selftest(ZOO, patterns=("BIT", "correct.*duc"))
    assert [m.name for m in plan.mutants] == ["bits"]
    assert (plan.strategies, plan.cases_each) == (("allreduce",), 6)
    quick = plan_selftest(ZOO, quick=True)
    assert (quick.strategies, quick.cases_each, quick.dtype) == (("allreduce", "ddp"), 4, "float32")
    with pytest.raises(UsageError, match=r"-k nothing: .* for example file\.both"):
        plan_selftest(ZOO, patterns=("bits", "nothing"))


def test_the_mutants_are_listed_for_two_backends() -> None:
    for backend in ("gloo", "simulated"):
        check_place(backend, "cpu")
        assert plan_selftest(ZOO, backend=backend).backend == backend
    with pytest.raises(UsageError, match=r"--backend simulated:tree: .*; expected gloo or simul"):
        check_place("simulated:tree", "cpu")


def test_the_zoo_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    with pytest.raises(CannotRunError, match="this machine has no NVIDIA GPU"):
        check_place("gloo", "cuda")
    with pytest.raises(UsageError, match="unknown --device 'tpu'; known are cpu and cuda"):
        check_place("gloo", "tpu")
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    check_place("gloo", "cuda")
    with pytest.raises(CannotRunError, match="simulated takes CPU tensors only"):
        check_place("simulated", "cuda")
    asked: list[str] = []

    def verified(strategy: str, **words: object) -> Report:
        asked.append(f"{words['backend']} on {words['device']}")
        return report(R)

    monkeypatch.setattr(command, "verify", verified)
    plan = plan_selftest(ZOO, patterns=["bits", "correct.ddp"], device="cuda")
    rows = list(command.run_plan(plan, begins=lambda name: None, environment={}))
    assert [row.name for row in rows] == ["bits", "one"]
    assert asked == ["gloo on cuda"] * 2


def test_a_mutant_that_cannot_show_is_not_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is caught earlier there is judged by what it is listed with."""
    asked: list[str] = []

    def verified(strategy: str, *, world: int, backend: str, device: str) -> Report:
        asked.append(f"{strategy} over {backend}")
        if strategy.endswith("forks"):
            raise NotSimulatedError("it forks")
        return report(("outcome", "-"), causes=("tensor-used-in-flight",))

    monkeypatch.setattr(command, "verify", verified)
    hashes, forks, early = (planted(name, R) for name in ("hashes", "forks", "early"))
    zoo = Zoo(
        mutants=(
            msgspec.structs.replace(hashes, processes=True),
            forks,
            msgspec.structs.replace(early, when_simulated=("tensor-used-in-flight",)),
        ),
        strategies=(),
    )
    plan = plan_selftest(zoo, backend="simulated")
    rows = list(command.run_plan(plan, begins=lambda _: None, environment={}))
    assert asked == ["zoo.file:forks over simulated", "zoo.file:early over simulated"]
    assert [row.verdict for row in rows] == ["left out", "left out", "caught"]
    assert (rows[2].naming, rows[2].as_listed) == ("right", True)
    counts = detection_counts(rows, planted=3, correct=0)
    assert (counts.planted, counts.unknown, counts.exit_code) == (1, 0, ExitCode.PASS)
    assert detection_counts(rows[:2], planted=2, correct=0).exit_code is ExitCode.UNKNOWN
    said = list(format_totals(SelftestResults(rows=tuple(rows), counts=counts, environment={})))
    assert "          forks is excluded: it forks" in said


def test_layers_are_gathered_under_their_check() -> None:
    assert format_checks([R, AGREE, S32]) == "gradients (rounding, full batch float32), agreement"


def test_the_table_says_what_is_wrong_and_how_to_see_it_again() -> None:
    rows = (
        judge_mutant(planted("fine", R), report(R, causes=("missing-sync",))),
        msgspec.structs.replace(judge_mutant(planted("gone", R), report()), replay="distcheck v"),
        judge_correct(report(R).cases[0]),
    )
    found = SelftestResults(
        rows=rows, counts=detection_counts(rows, planted=3, correct=1), environment={"torch": "2"},
        elsewhere=ZOO.elsewhere,
    )  # fmt: skip
    text = "\n".join(shown(found).split("\n"))
    assert "MISSED" in text
    assert "distcheck v" in text
    assert "FALSE POSITIVE" in text
    assert list(format_totals(found)) == [
        "mutants   3 planted: 1 caught, 1 missed; 1 named correctly, 0 named incorrectly, "
        "0 unexplained",
        "correct   1 cases: 0 passed, 1 false positives",
        "          data_parallel is not included: it needs device cuda",
        "unknown   1 planned cases have no verdict",
        "time      0 s",
    ]
    document = json.loads(render_json(found))
    assert (document["schema"], document["exit_code"]) == ("distcheck.selftest/1", 1)
    assert document["rows"][1]["verdict"] == "missed"


def test_a_command_that_repeats_a_mutant_is_whole_on_a_narrow_screen() -> None:
    replay = "distcheck verify --strategy distcheck_mutants.subtle.absent:" + "zeros_" * 9
    row = SelftestVerdict(kind="mutant", name="one", file="f", verdict="missed", replay=replay)
    found = SelftestResults(
        rows=(row,), counts=detection_counts([row], planted=1, correct=0), environment={}
    )
    console = Console(width=60)
    with console.capture() as screen:
        render(found, console)
    assert f"  {replay}" in screen.get().splitlines()
    assert not [line for line in screen.get().splitlines() if line != line.rstrip()]


def shown(found: SelftestResults) -> str:
    from distcheck.reports.terminal import console_for

    console = console_for(width=100)
    with console.capture() as captured:
        render(found, console)
    return captured.get()


def test_rows_are_unknown_until_they_are_judged() -> None:
    assert not SelftestVerdict(kind="mutant", name="one").good
