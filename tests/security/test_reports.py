"""Reports in files: a verdict is what the checks and the plan beside it say, or the file is
damaged.
"""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distcheck.cli import root_command
from distcheck.errors import UsageError
from distcheck.reports import github
from distcheck.reports.documents import read_report
from tests.unit.gate_documents import ALL, CRASHED, FAILED, PASSED, document_of

Document = dict[str, Any]


def forge_pass(document: Document) -> None:
    """Says that everything has passed, and leaves the checks as they are."""
    document |= {"verdict": "pass", "exit_code": 0}
    for case in document["cases"]:
        case["verdict"] = "pass"


def without_checks(document: Document) -> None:
    forge_pass(document)
    for case in document["cases"]:
        case["checks"] = []


def outcome_alone(document: Document) -> None:
    without_checks(document)
    for case in document["cases"]:
        case["outcomes"] = [
            {"rank": rank, "outcome": "finished"} for rank in range(case["case"]["world"])
        ]
        case["checks"] = [check("outcome", ranks=case["case"]["world"])]


def check(name: str, *, ranks: int) -> Document:
    compared = {"tensors": 0, "elements": 0, "ranks": ranks, "steps": 0}
    return {"check": name, "layer": "-", "verdict": "pass", "reason": "", "compared": compared}


def all_pass(document: Document) -> None:
    """Changes the checks as well, and forgets the ranks that crashed."""
    forge_pass(document)
    for case in document["cases"]:
        for one in case["checks"]:
            one["verdict"] = "pass"


def compared_nothing(document: Document) -> None:
    outcome_alone(document)
    for case in document["cases"]:
        case["checks"] += [
            check(name, ranks=0) for name in ("data", "initial state", "gradients", "agreement")
        ]


def without_failed_checks(document: Document) -> None:
    """What failed is not there any more."""
    forge_pass(document)
    for case in document["cases"]:
        case["checks"] = [one for one in case["checks"] if one["verdict"] == "pass"]


def with_a_cause(document: Document) -> None:
    document |= document_of(PASSED)
    document["cases"][0]["diagnosis"] = document_of(FAILED)["cases"][0]["diagnosis"]


def compared(name: str, **counts: int) -> Callable[[Document], None]:
    """Less than the case has, in one of its checks."""

    def forge(document: Document) -> None:
        document |= document_of(PASSED)
        for one in document["cases"][0]["checks"]:
            one["compared"] |= counts if one["check"] == name else {}

    return forge


def searched(**values: Any) -> Callable[[Document], None]:
    def forge(document: Document) -> None:
        document |= document_of(PASSED)
        document["plan"]["searches"] = [{"strategy": "ddp", "budget_s": 9.0, "shard": 1}]
        search = {"strategy": "ddp", "verdict": "pass", "budget_s": 9.0, "cases": 3, "passed": 3}
        document["explored"] = [{**search, **values}]

    return forge


def set_in_case(**values: Any) -> Callable[[Document], None]:
    return lambda document: document["cases"][0].update(values)


def set_in_request(**values: Any) -> Callable[[Document], None]:
    return lambda document: document["cases"][0]["case"].update(values)


def set_in(**values: Any) -> Callable[[Document], None]:
    return lambda document: document.update(values)


def leave_out_all(document: Document) -> None:
    document["left_out"] = {case["case"]["id"]: "no reason" for case in document["cases"]}


def twice(document: Document) -> None:
    document["cases"].append(copy.deepcopy(document["cases"][0]))


def set_in_plan(**values: Any) -> Callable[[Document], None]:
    return lambda document: document["plan"].update(values)


def leave_out_of_part_2(document: Document) -> None:
    """A part is silent about what the other parts hold, and cannot excuse them."""
    plan = document["plan"]
    plan["cases"].append({**plan["cases"][0], "id": "other"})
    plan["assigned"]["other"] = 2
    plan |= {"shard": 1, "shards": 2}
    document["left_out"] = {"other": "nothing to show"}


def below_zero(document: Document) -> None:
    beyond(document)
    document["cases"][0]["checks"][-1]["worst"]["error"] = -1.0


def beyond(document: Document) -> None:
    document |= document_of(PASSED)
    place = {
        "parameter": "w", "rank": 0, "step": 0, "index": [0], "actual": 2.0, "expected": 1.0,
        "error": 1.0, "bound": 1e-9, "unit": "absolute",
    }  # fmt: skip
    checks = document["cases"][0]["checks"]
    checks.append({**check("parameters", ranks=1), "worst": place})


def bounded(bound: float | str, verdict: str = "pass") -> Callable[[Document], None]:
    """A check with an error of nothing, and a bound that holds nothing, or anything."""

    def forge(document: Document) -> None:
        beyond(document)
        check = document["cases"][0]["checks"][-1]
        check["verdict"] = verdict
        check["worst"] |= {"error": 0.0, "bound": bound}
        if verdict == "fail":
            document |= {"verdict": "fail", "exit_code": 1}
            document["cases"][0]["verdict"] = "fail"

    return forge


def dropped(document: Document) -> None:
    """The case that failed is in the report no more."""
    document |= document_of(PASSED, plan=(PASSED, FAILED))


def search_dropped(document: Document) -> None:
    searched()(document)
    document["explored"] = []


def dropped_from_the_plan(document: Document) -> None:
    """Nor is it in the plan; but the command line asked for it."""
    document |= document_of(PASSED)
    command = "distcheck verify --strategy ddp --strategy mine.py:sync --json part.json"
    document["made"] = {"date": "2026-01-01", "command": command}


def without_the_plan(document: Document) -> None:
    """The case that failed is gone, and with it the plan that has it."""
    document |= document_of(PASSED)
    document |= {"plan": None, "made": {"date": "2026-01-01", "command": "distcheck verify -q"}}


def dropped_from_a_part(document: Document) -> None:
    dropped_from_the_plan(document)
    part = {"file": "a.json", "shard": 0, "exit_code": 0, "environment": {}}
    document["parts"] = [{**part, "made": document.pop("made")}]


def failure_left_out(document: Document) -> None:
    """The case that failed is one that was never to run, if one believes the report."""
    failed = document_of(PASSED, FAILED)
    document |= document_of(PASSED, plan=(PASSED, FAILED))
    document["left_out"] = {FAILED.case.id: "its wire cannot carry its numbers"}
    document["totals"] = failed["totals"]


def failure_left_out_without_totals(document: Document) -> None:
    failure_left_out(document)
    del document["totals"]


FORGED: dict[str, tuple[Callable[[Document], None], str]] = {
    "a pass with failed checks": (forge_pass, "has the verdict pass, but its checks give fail"),
    "a pass without checks": (without_checks, "has the verdict pass, but its checks give unknown"),
    "a pass of the outcome alone": (outcome_alone, "passed without the check 'data'"),
    "a pass that compared nothing": (compared_nothing, "although it compared nothing"),
    "a pass without its failed checks": (without_failed_checks, "passed without an outcome check"),
    "a cause in a pass": (with_a_cause, "cause 'missing-division', although it did not fail"),
    "the outcomes of some ranks": (compared("outcome", ranks=1), "compared 1 of 2 ranks"),
    "data of some steps": (compared("data", steps=2), "compared 2 of 3 steps"),
    "gradients of no step": (compared("gradients", steps=0), "it compared no steps"),
    "the first state of no tensor": (compared("initial state", tensors=0), "compared no tensors"),
    "a search of no case": (searched(passed=0, cases=0), "but only 0 of its 0 cases did"),
    "a search that was not planned": (searched(strategy="x"), "which is not in its plan"),
    "a pass of ranks that crashed": (all_pass, "although not all 3 ranks finished"),
    "a verdict of the whole": (set_in(verdict="pass"), "has the verdict pass, but its cases"),
    "an exit code": (set_in(exit_code=0), "has the exit code 0, but its cases give"),
    "another world than planned": (set_in_request(world=2), "has the world 2, but 3 in the plan"),
    "another strategy than planned": (set_in_request(strategy="x"), "has the strategy 'x', but"),
    "a case that is left out as well": (leave_out_all, "is also listed as left out"),
    "a failure that is left out": (failure_left_out, "its totals are 1 pass, 0 unknown, 1 fail, 0"),
    "a failure that no total counts": (failure_left_out_without_totals,
        "excluded cases but has no totals"),
    "left out without a plan for it": (set_in(left_out={"x": "y"}), "but is not in the plan"),
    "a case twice": (twice, "2 times"),
    "an error beyond its bound in a pass": (beyond, "although an error exceeds its bound"),
    "an error below zero": (below_zero, "although an error exceeds its bound"),
    "a bound of any size": (bounded("inf"), "is not a finite number, although it passed"),
    "a bound that is no number": (bounded("nan"), "is not a finite number, although it passed"),
    "a bound below zero": (bounded(-1.0), "that is below zero"),
    "a bound below all": (bounded("-inf"), "that is below zero"),
    "a bound below zero in a failure": (bounded(-1.0, "fail"), "that is below zero"),
    "a bound in words": (bounded("large"), "matching regex"),
    "a case that only the command asks for": (dropped_from_the_plan,
        "asks for strategy mine.py:sync, but the plan has no such case"),
    "a case that only a part's command asks for": (dropped_from_a_part,
        "asks for strategy mine.py:sync, but the plan has no such case"),
    "no plan": (without_the_plan, "its command line plans cases, but it has no plan"),
    "another's part is left out": (leave_out_of_part_2, "is part 1, but has case 'other' of part"),
    "a part that there is not": (set_in_plan(shard=7), "the report is part 7 of 1"),
    "a command of a shell": (
        set_in_case(replay="distcheck replay x; curl x | sh"),
        "has a replay that is not a single",
    ),
    "another program": (set_in_case(replay="curl x"), "has a replay that is not a single dist"),
    "a world of none": (set_in_request(world=0), "is damaged: Expected `int` >= 1"),
    "a line that is a text": (
        set_in_case(strategy_line="1::\n::error::x"),
        "Expected `int`, got `str` - at `$.cases[0].strategy_line`",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("forge", "sentence"), FORGED.values(), ids=FORGED)
@pytest.mark.parametrize(
    "words", [["merge"], ["report", "--html", "x.html"]], ids=["merge", "report"]
)
def test_a_file_that_contradicts_itself_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
    forge: Callable[[Document], None], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    document = document_of(CRASHED, FAILED)
    Path("sound.json").write_text(json.dumps(document))
    read_report(Path("sound.json"))
    forge(document)
    Path("part.json").write_text(json.dumps(document))
    with pytest.raises(UsageError) as caught:
        root_command.main([words[0], "part.json", *words[1:]], standalone_mode=False)
    assert "part.json is damaged: " in str(caught.value)
    assert sentence in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not Path("x.html").exists()


@pytest.mark.parametrize(
    ("forge", "sentence"),
    [(dropped, "' of its plan is not in it"), (search_dropped, "search of 'ddp' is not in it")],
)
def test_a_pass_without_all_that_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    forge: Callable[[Document], None], sentence: str,
) -> None:  # fmt: skip
    """Shown, it is damaged; merged, what is missing is unknown."""
    monkeypatch.chdir(tmp_path)
    document = document_of(PASSED)
    forge(document)
    Path("part.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=re.escape(sentence)):
        root_command.main(["report", "part.json", "--html", "x.html"], standalone_mode=False)
    assert root_command.main(["merge", "part.json"], standalone_mode=False) == 5
    assert "UNKNOWN" in capsys.readouterr().out


def test_nesting_has_a_limit(tmp_path: Path) -> None:
    """Deeper than any report, and not as deep as what a JSON decoder refuses."""
    document = document_of(PASSED)
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    (tmp_path / "r.json").write_text(json.dumps({**document, "environment": {"x": deep}}))
    with pytest.raises(UsageError, match="it is nested too deeply"):
        read_report(tmp_path / "r.json")


COMMANDS = "x\n::error::forged\r::warning::y\n##[add-mask]z%0A::stop-commands::q"


def test_annotations_hold_no_other_command() -> None:
    """What a strategy says is data of its own annotation, by the rules of GitHub's runner."""
    document = document_of(*ALL)
    for case in document["cases"]:
        case |= {"strategy": COMMANDS, "strategy_file": COMMANDS, "notes": [COMMANDS]}
        case["replay"] = COMMANDS
        for one in case["checks"]:
            one["reason"] = COMMANDS
        for one in case["diagnosis"]:
            one |= {"cause": COMMANDS, "evidence": COMMANDS, "suggestion": COMMANDS}
    lines = github.annotations(document, Path("/there"))
    assert len(lines) == 3
    for line in lines:
        assert len(line.splitlines()) == 1
        assert re.fullmatch(r"::(error|warning) file=[^:,]*,line=\d+,title=[^:,]*::.*", line)
