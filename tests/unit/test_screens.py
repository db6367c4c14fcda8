"""Report screens, compared to the letter with tests/snapshots/."""

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from distcheck.judge.diagnosis import outcomes
from distcheck.plan.case_remarks import why_not_run_after_hang
from distcheck.records import (
    Adaptation,
    CallSite,
    Case,
    CaseReport,
    CheckResult,
    Compared,
    Diagnosis,
    Difference,
    Origin,
    Outcome,
    Report,
)
from distcheck.records.causes import APART, name_cause
from distcheck.records.ledger import Ledger, LedgerRow
from distcheck.records.run_facts import LIMIT
from distcheck.reports import brief, training_report
from distcheck.reports.brief import next_step
from distcheck.reports.failures import describe_rank_exits
from distcheck.reports.findings import summary_lines
from distcheck.reports.json_report import document_of, render_json
from distcheck.reports.terminal import render, render_text, summarize
from distcheck.reports.wrapping import wrap
from tests.stored import compare

ENVIRONMENT = {
    "distcheck": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "backend": "gloo",
    "device": "cpu", "threads": 1, "cpu": "A Processor",
}  # fmt: skip


def case(dtype: str = "float32", workload: str = "cnn", strategy: str = "allreduce") -> Case:
    return Case(
        id=f"{strategy}-w4-{workload}-{dtype}", strategy=strategy, world=4, workload=workload,
        dtype=dtype,
    )  # fmt: skip


def check(
    name: str, layer: str, verdict: str = "pass", *, elements: int = 4_014_456, tensors: int = 8,
    ranks: int = 4, steps: int = 3, worst: Difference | None = None,
    first: Difference | None = None, reason: str = "",
) -> CheckResult:  # fmt: skip
    return CheckResult(
        check=name,
        layer=layer,
        verdict=verdict,  # type: ignore[arg-type]
        compared=Compared(tensors=tensors, elements=elements, ranks=ranks, steps=steps),
        worst=worst,
        first=first,
        reason=reason,
    )


_ULP = 2**-32  # of float32, near 0.00243
_EXPECTED = 10_440_614 * _ULP


def place(error: float, bound: float, *, step: int = 0, unit: str = "absolute") -> Difference:
    """An element, or a tensor by its norm, with an error of this size."""
    absolute = unit == "absolute"
    return Difference(
        parameter="7.weight", rank=2, step=step, index=(103, 332) if absolute else (),
        actual=_EXPECTED + error, expected=_EXPECTED, error=error, bound=bound,
        ulp=round(error / _ULP) if absolute else None, unit=unit,
    )  # fmt: skip


FINISHED = tuple(Outcome(rank=rank, outcome="finished") for rank in range(4))
OUTCOME = CheckResult(check="outcome", layer="-", verdict="pass", compared=Compared(ranks=4))


def passed(strategy: str = "allreduce") -> list[CaseReport]:
    float32 = (
        OUTCOME,
        CheckResult(
            check="data", layer="-", verdict="pass",
            compared=Compared(elements=768, ranks=4, steps=3),
        ),
        check("local gradients", "bitwise"),
        check("gradients", "bitwise"),
        check("gradients", "rounding", worst=place(3.46e-10, 7.24e-10)),
        check("gradients", "full batch float32", worst=place(3.7e-8, 2.5e-7, unit="L2 norm")),
        check("rerun", "-", elements=18_734_128, reason="in separate interpreters: delays"),
    )  # fmt: skip
    float64 = (
        OUTCOME,
        check("gradients", "full batch float64", worst=place(3e-16, 3.6e-13, unit="L2 norm")),
    )
    return [
        CaseReport(
            case=case(strategy=strategy), strategy_file="/x/allreduce.py", verdict="pass",
            outcomes=FINISHED, checks=float32, timings_s={"world": 0.5},
            replay="distcheck replay run/cases/a.json",
        ),
        CaseReport(
            case=case("float64", strategy=strategy), strategy_file="/x/allreduce.py",
            verdict="pass", outcomes=FINISHED, checks=float64, replay="distcheck replay b.json",
        ),
    ]  # fmt: skip


def mismatch() -> CaseReport:
    first = place(12 * _ULP, 0.0, step=1)
    return CaseReport(
        case=case(workload="mlp", strategy="mine.py:sync"),
        strategy_file="/x/mine.py",
        verdict="fail",
        outcomes=FINISHED,
        checks=(
            OUTCOME,
            check("gradients", "bitwise", "fail", worst=first, first=first),
            check(
                "gradients", "rounding", "fail", worst=place(12 * _ULP, 9.2e-10, step=1),
                first=place(12 * _ULP, 9.2e-10, step=1),
            ),
            check("loss", "full batch float32", "unknown", elements=4, tensors=1,
                  reason="compared only 4 of 12 elements"),
        ),
        diagnosis=(
            name_cause("unexplained", f"gradients diverge first: {first.place}"),
        ),
        where=CallSite(file="/x/mine.py", line=12, code="dist.all_reduce(p.grad)"),
        replay="distcheck replay run/cases/mine-sync-w4-mlp-float32.json",
        notes=("no hook can record the local gradients before the all-reduce: only the reduced "
               "gradients are checked",),
    )  # fmt: skip


def crash() -> CaseReport:
    victims = [
        Outcome(
            rank=rank,
            outcome="raised",
            step=1,
            phase="sync",
            lost_peer=True,
            text="long\ntext",
            lost_at=" at mine.py:9 (last collective: all_reduce of [10x64], number 4)",
        )
        for rank in (0, 1, 3)
    ]
    cause = Outcome(
        rank=2, outcome="raised", step=1, phase="sync", error="ValueError: no gradient",
        text='  File "mine.py", line 8, in sync\n    raise ValueError("no gradient")\n'
        "ValueError: no gradient",
    )  # fmt: skip
    ends = (cause, *victims)
    return CaseReport(
        case=case(workload="mlp", strategy="mine.py:sync"),
        strategy_file="/x/mine.py",
        verdict="fail",
        outcomes=ends,
        checks=(
            CheckResult(
                check="outcome", layer="-", verdict="fail", compared=Compared(ranks=4),
                reason="rank 2 raised an exception",
            ),
            check("gradients", "rounding", "unknown", steps=1, reason="compared only 1 of 3 steps"),
            check("loss", "bitwise", "unknown", steps=1, elements=4, tensors=1,
                  reason="compared only 1 of 3 steps"),
        ),
        diagnosis=tuple(outcomes.explain(ends)),
        replay="distcheck replay c.json",
    )  # fmt: skip


def unfinished(cases: int) -> list[CaseReport]:
    """Cases that an interruption came before."""
    unknown = check("gradients", "rounding", "unknown", reason="not judged: interrupted")
    return [
        CaseReport(
            case=case(workload=f"w{number}", strategy="mine.py:sync"),
            strategy_file="/x/mine.py",
            verdict="unknown",
            outcomes=(),
            checks=(unknown,),
            replay="distcheck replay d.json",
            notes=(f"w{number} is a cell",),
            unfinished=True,
        )
        for number in range(cases)
    ]


_NOT_DIVIDED = (
    "step 0: the loss is not divided by the 2 gradient accumulation steps, so gradients are 2x too "
    "large"
)


def job() -> CaseReport:
    """A whole training job whose loss is not divided, with a remark that is no failure."""
    words = ("--", "torchrun", "--nproc-per-node", "2", "train.py")
    return CaseReport(
        case=Case(
            id="job", strategy="train.py", world=2, workload="job", data="job", batch=32, steps=8,
            job=words,
        ),
        strategy_file="train.py",
        verdict="fail",
        outcomes=(),
        checks=(
            check("gradients", "rounding", ranks=2, steps=8, worst=place(3.46e-10, 7.24e-10)),
            check("loss scale", "-", "fail", ranks=2, steps=8, tensors=1, elements=16,
                  first=Difference(parameter="factor of the loss", rank=0, step=0, index=(),
                                   actual=2.0, expected=1.0, error=0.0, bound=0.0, unit=""),
                  reason=_NOT_DIVIDED),
        ),
        diagnosis=(name_cause("accumulation-not-scaled", _NOT_DIVIDED),),
        remarks=(
            name_cause(
                "shared-rng-seed", "step 0: ranks 0 and 1 draw the same random numbers", "job"
            ),
        ),
        where=CallSite(file="train.py", line=20, code="loss.backward()"),
        replay="distcheck job -- torchrun --nproc-per-node 2 train.py",
        notes=("the reference is the same script in a single process",),
        ledger=Ledger(
            step=7, gradients=500, gradient_bytes=2000, policy="float32",
            rows=(
                LedgerRow(operation="all_reduce", group="world", ranks=2, dtype="float32",
                          calls=2, bytes=4000, place="train.py:20"),
                LedgerRow(operation="broadcast", group="tp", ranks=2, dtype="int64", calls=1,
                          bytes=8, library="FSDP"),
            ),
        ),
    )  # fmt: skip


def two_causes(workload: str, *causes: str, world: int = 4) -> CaseReport:
    """A case with these causes, in this order."""
    report = mismatch()
    names = {"exact": ("'table'", "dense.bias"), "cnn": ("7.weight", "7.bias")}
    summed, left = names.get(workload, ("5.weight", "5.bias"))
    found = {
        "missing-division": name_cause(
            "missing-division",
            f"step 0, parameter {summed} (1 of 6): every rank holds {world} times the mean over "
            "all samples; gradients were correct after backward, so synchronization introduced "
            "the factor", "once", "twice", world=world,
        ),
        "partial-sync": name_cause(
            "partial-sync",
            f"step 0, parameter {left} (1 of 6): ranks hold their local gradients there, but not "
            "in the other parameters",
        ),
        "unweighted-mean": name_cause(
            "unweighted-mean",
            "step 0, all 6 parameters: all ranks are weighted equally; weights by number of "
            "samples are 0.3359375, 0.3320312, 0.3320312",
        ),
    }  # fmt: skip
    layer, right, bound = "rounding", _EXPECTED, 9.2e-10
    if workload == "exact":
        layer, right, bound = "exact", 523.0, 0.0
    factor, wrong = (world, summed.strip("'")) if "missing-division" in causes else (1.5, left)
    first = Difference(
        parameter=wrong, rank=0, step=0, index=(5,), actual=factor * right, expected=right,
        error=(factor - 1) * right, bound=bound,
    )  # fmt: skip
    checks = (
        msgspec.structs.replace(OUTCOME, compared=Compared(ranks=world)),
        check("gradients", layer, "fail", ranks=world, worst=first, first=first),
    )
    own = msgspec.structs.replace(report.case, workload=workload, world=world)
    return msgspec.structs.replace(
        report, case=own, checks=checks, outcomes=FINISHED[:world], notes=(),
        diagnosis=tuple(found[cause] for cause in causes),
        replay=f"distcheck replay run/cases/mine-sync-w{world}-{workload}-float32.json",
    )  # fmt: skip


REPORTS = {
    "two-causes": Report(
        environment=ENVIRONMENT,
        cases=(
            two_causes("exact", "missing-division", "partial-sync"),
            two_causes("cnn", "partial-sync", "missing-division"),
            two_causes("mlp", "partial-sync"),
            two_causes("exact", "missing-division", "unweighted-mean", "partial-sync", world=3),
        ),
        saved_to="run",
    ),
    "job": Report(environment=ENVIRONMENT, cases=(job(),), saved_to=".distcheck/runs/1"),
    "pass": Report(
        environment=ENVIRONMENT,
        cases=tuple(passed()),
        saved_to=".distcheck/runs/1",
        not_shown=("world sizes other than 4", "bugs that first appear after step 3"),
    ),
    "several": Report(environment=ENVIRONMENT, cases=(*passed(), *passed("ddp"))),
    "mismatch": Report(environment=ENVIRONMENT, cases=(mismatch(),), saved_to="run"),
    "crash": Report(environment=ENVIRONMENT, cases=(*passed(), crash())),
    "interrupted": Report(
        environment=ENVIRONMENT, cases=(*passed(), *unfinished(3)), interrupted=True
    ),
}


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("name", REPORTS)
def test_screens(name: str, width: int) -> None:
    compare(
        f"{name}{'' if width == 100 else f'-{width}'}.txt", render_text(REPORTS[name], width=width)
    )


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("name", ["two-causes", "job", "several"])
def test_screens_of_documents(name: str, width: int) -> None:
    """What `merge` and `report` print."""
    lines = summary_lines(document_of(REPORTS[name]), width=width)
    assert all(len(line) <= width or "replay" in line for line in lines)
    compare(f"document-{name}-{width}.txt", "\n".join(lines))


@pytest.mark.parametrize("name", REPORTS)
def test_whole_screens(name: str) -> None:
    compare(f"{name}-verbose.txt", render_text(REPORTS[name], width=100, verbose=True))


def failing(
    workload: str, cause: str, *, world: int = 4, strategy: str = "mine.py:sync"
) -> CaseReport:
    report = mismatch()
    own = msgspec.structs.replace(report.case, workload=workload, world=world, strategy=strategy)
    found = Diagnosis(cause=cause, evidence=f"seen in {workload}", suggestion="mend it")
    return msgspec.structs.replace(report, case=own, diagnosis=(found,), notes=())


def test_failures_that_repeat_are_said_once_with_their_cases() -> None:
    cases = (
        failing("exact", "missing-sync"), failing("mlp", "crash"), failing("cnn", "missing-sync"),
        failing("vgg11", "missing-sync"), failing("cnn", "missing-sync", world=3),
        failing("cnn", "missing-sync", strategy="other.py:sync"),
    )  # fmt: skip
    report = Report(environment=ENVIRONMENT, cases=cases)
    lines = render_text(report, width=100).splitlines()
    causes = [line.split(maxsplit=1)[1] for line in lines if line.strip().startswith("cause")]
    assert causes == ["seen in exact", "seen in mlp", "seen in cnn"]
    assert "      also in  cnn float32, vgg11 float32" in lines
    assert "      also in  cnn float32 (as with 4 ranks, see above)" in lines
    whole = render_text(report, width=100, verbose=True)
    assert whole.count("cause    ") == len(cases), "--verbose shows each"


def test_what_is_cut_ends_in_dots_and_the_screen_says_where_it_is_whole() -> None:
    long = msgspec.structs.replace(
        failing("cnn", "missing-sync").diagnosis[0],
        evidence="; ".join(f"clause {n} of what was seen in this case" for n in range(9)),
        suggestion="a first thing to look at, " * 20,
    )
    report = Report(
        environment=ENVIRONMENT,
        cases=(msgspec.structs.replace(failing("cnn", "missing-sync"), diagnosis=(long,)),),
        saved_to=".distcheck/runs/1",
    )
    screen = render_text(report, width=80)
    cut = [line for line in screen.splitlines() if line.endswith("...")]
    assert [line.rpartition(" ")[0][-10:] for line in cut] == ["this case;", "t, a first"]
    more = 'distcheck explain missing-sync, distcheck open, -v    # "..." in full: distcheck open'
    assert screen.splitlines()[-1] == f"more   {more} or -v"
    assert "..." not in render_text(report, width=80, verbose=True)
    *_, whole = summary_lines(document_of(report), width=80)
    assert whole == 'more    "..." in full: --html FILE'
    assert "in full" not in render_text(REPORTS["mismatch"], width=80)


def test_a_limit_of_the_verdict_is_not_among_the_notes_that_are_counted() -> None:
    limit = f"{LIMIT}{'small tensors are not judged ' * 12}end"
    case = REPORTS["pass"].cases[0]
    report = msgspec.structs.replace(
        REPORTS["pass"],
        cases=(msgspec.structs.replace(case, notes=("one", "two", "three", limit)),),
    )
    screen = render_text(report, width=80)
    assert " ".join(limit.split()) in " ".join(screen.split())
    assert "more notes" in screen


def test_causes_of_which_the_same_is_seen_are_shown_once() -> None:
    names = ("single-rank-gradient", "dropped-rank", "duplicated-rank")
    alike = [
        Diagnosis(
            cause=name,
            evidence=f"step 0: every rank holds rank 1's own gradient; {APART} "
            f"{' or '.join(other for other in names if other != name)} (a world of 3 ranks can)",
            suggestion=f"mend {name}",
        )
        for name in names
    ]
    report = msgspec.structs.replace(failing("cnn", "missing-sync"), diagnosis=tuple(alike))
    lines = render_text(Report(environment=ENVIRONMENT, cases=(report,)), width=120).splitlines()
    assert [line.strip() for line in lines[1:3]] == [
        "cause    step 0: every rank holds rank 1's own gradient",
        "or       dropped-rank, duplicated-rank, which look the same here; --world 3 "
        "distinguishes them",
    ]
    alone = failing("cnn", "dropped-rank", world=3)
    both = Report(environment=ENVIRONMENT, cases=(report, alone))
    assert "      cause    seen in cnn" in render_text(both, width=120).splitlines()


def test_what_nothing_explains_has_its_evidence_and_not_the_first_place_twice() -> None:
    found = mismatch().diagnosis[0]
    whole = f"{found.evidence}; in rank 0's result the ranks' gradients count 1, 1"
    report = msgspec.structs.replace(
        mismatch(), diagnosis=(msgspec.structs.replace(found, evidence=whole),)
    )
    lines = render_text(Report(environment=ENVIRONMENT, cases=(report,)), width=100).splitlines()
    assert lines[1] == "      cause    in rank 0's result the ranks' gradients count 1, 1"
    assert lines[2].startswith("      first    workload mlp float32: gradients, step 1, ")


def test_what_nothing_explains_is_not_taken_for_the_same() -> None:
    cases = (failing("cnn", "unexplained"), failing("mlp", "unexplained"))
    text = render_text(Report(environment=ENVIRONMENT, cases=cases), width=100)
    assert (text.count("seen in cnn"), text.count("seen in mlp")) == (1, 1)


def test_an_interruption_before_anything_was_judged_is_four_lines() -> None:
    report = Report(
        environment=ENVIRONMENT, cases=tuple(unfinished(28)), saved_to="run", interrupted=True
    )
    assert render_text(report, width=80).splitlines() == [
        "UNKNOWN interrupted: 28 of 28 cases were not judged: mine.py:sync, world 4",
        "next   distcheck verify --strategy mine.py:sync --world 4",
        "saved  run",
    ]


def hung(world: int) -> list[CaseReport]:
    """A case that hung, and one that was not run after it, for that reason."""
    first = failing("exact", "hang", world=world)
    other = msgspec.structs.replace(first.case, workload="cnn")
    why = why_not_run_after_hang(other, first.case)
    not_run = msgspec.structs.replace(
        first, case=other, verdict="unknown", outcomes=(), diagnosis=(),
        checks=(check("outcome", "-", "unknown", reason=why),),
    )  # fmt: skip
    return [first, not_run]


def test_an_interruption_after_a_hang_keeps_the_two_reasons_apart() -> None:
    """What was not run because of the hang says so; what came after the interruption is counted."""
    report = Report(
        environment=ENVIRONMENT, cases=(*hung(4), *hung(3), *unfinished(5)), interrupted=True
    )
    text = " ".join(render_text(report, width=100).split())
    assert "unknown cnn float32: not run: the strategy hung in exact float32" in text
    assert "UNKNOWN interrupted: 5 of 9 cases were not judged: mine.py:sync, world 4" in text
    assert "not judged: interrupted" not in text
    assert text.count("(as with 4 ranks, see above)") == 2
    assert "()" not in text, "what has no cause says none"
    assert "next distcheck verify --strategy mine.py:sync --world 4" in text


@pytest.mark.parametrize("width", [80, 60])
def test_narrow_terminals(width: int) -> None:
    text = render_text(REPORTS["mismatch"], width=width, verbose=True)
    to_copy = ("next ", "saved ", "replay ")
    lines = [line for line in text.splitlines() if not line.strip().startswith(to_copy)]
    assert max(map(len, lines)) <= width
    compare(f"mismatch-verbose-{width}.txt", text)


@pytest.mark.parametrize("width", [120, 100, 80, 60])
def test_the_verdict_of_every_check_is_there_at_any_width(width: int) -> None:
    text = render_text(REPORTS["mismatch"], width=width, verbose=True)
    _, _, table = text.partition("  check ")
    rows = [line.split() for line in table.splitlines()][1:7]
    found = [word for row in rows for word in row if word in ("ok", "fail", "unknown")]
    assert found[:4] == ["ok", "fail", "fail", "unknown"]


@pytest.mark.parametrize("width", [100, 80, 60, 40])
@pytest.mark.parametrize("name", REPORTS)
def test_no_line_ends_in_blanks_and_no_number_is_broken(name: str, width: int) -> None:
    text = render_text(REPORTS[name], width=width)
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    if name == "mismatch":
        if width >= 80:
            assert f"got {_EXPECTED + 12 * _ULP:.9g}" in text
            assert "7.weight[103,332]" in text
        whole = render_text(REPORTS[name], width=width, verbose=True)
        assert [line for line in whole.splitlines() if line != line.rstrip()] == []
        for number in ("7.weight[103,332]", "(12 ULP)", "bound 0"):
            assert number in whole


def test_words_that_are_longer_than_a_line_are_broken_beside_numbers() -> None:
    name = "model.encoder.layers.11.attention.self.query.weight[103,1332]"
    for width in range(20, 70):
        lines = wrap(f"step 1, {name}, rank 2: error 1.25e-10, 1,330,408 elements", width)
        assert max(map(len, lines)) <= width
        for whole in ("step 1", "rank 2", "error 1.25e-10", "103,1332]", "1,330,408"):
            assert any(whole in line for line in lines), (width, whole, lines)
    assert wrap("x" * 25, 20) == ["x" * 20, "x" * 5]
    assert wrap("  indented\n\nlast", 20) == ["  indented", "", "last"]


COMMAND = (
    "distcheck verify --strategy 'my dir/m.py:f' --world 4 --arg lr=0.1 --data mnist "
    "--data-dir d --steps 5 --save run --json=r.json"
)


def with_command(command: str, *, worlds: tuple[int, ...] = (4,), **more: Any) -> Report:
    made = Origin(date="2026-01-31T12:00:00+00:00", command=command)
    cases = [
        CaseReport(
            case=msgspec.structs.replace(case(workload="mlp"), world=world, seed=6, **more),
            strategy_file="",
            verdict="pass",
            outcomes=(),
            checks=(),
        )
        for world in worlds
    ]
    return Report(environment=ENVIRONMENT, cases=tuple(cases), made=made)


KEPT = (
    "distcheck verify --strategy 'my dir/m.py:f' --arg lr=0.1 --data mnist --data-dir d --steps 5"
)


def test_a_job_of_one_rank_runs_again_as_a_job() -> None:
    report = with_command("", worlds=(1,), job=("--", "python", "train.py"))
    of_job = [
        msgspec.structs.replace(c, verdict="unknown", replay=c.case.command_line)
        for c in report.cases
    ]
    unknown = msgspec.structs.replace(report, cases=tuple(of_job))
    assert next_step(unknown) == "distcheck job -- python train.py"


def test_next_keeps_the_options_that_were_given() -> None:
    assert next_step(with_command(COMMAND)).startswith(f"{KEPT} --world 3 --world 5 ")
    typed = KEPT.replace(" --arg", " --world 4 --arg")
    larger = next_step(with_command(f"{COMMAND} --workload mlp --thorough", worlds=(3,)))
    assert larger.startswith(f"{typed.removesuffix(' --steps 5')} --workload vgg11 ")
    recorded = COMMAND.replace("verify", "record golden").replace(" --save run", "")
    assert next_step(with_command(recorded)).startswith(f"{KEPT} --world 3 --world 5 ")
    digests = recorded.replace("record golden", "record --digests") + " golden"
    kept = msgspec.structs.replace(with_command(digests), saved_to="golden")
    assert next_step(kept) == "distcheck compare golden    # after the change"
    interrupted = msgspec.structs.replace(with_command(COMMAND), interrupted=True)
    assert next_step(interrupted) == typed
    again = next_step(with_command(f"{COMMAND} --seed 6", worlds=(3,), workload="vgg11"))
    assert again == f"{typed} --seed 7"


def test_next_of_a_run_that_was_no_command_has_the_options_of_its_cases() -> None:
    report = with_command("pytest tests", batch=64, backend="mpi", accept="quantized:8")
    assert next_step(report).startswith(
        "distcheck verify --strategy allreduce --backend mpi --batch 64 --accept quantized:8 "
        "--world 3 --world 5 "
    )
    assert next_step(with_command("", separate=False)).startswith(
        "distcheck verify --strategy allreduce --no-separate --world 3 --world 5 "
    )


def test_next_names_no_world_that_lacks_a_rank_without_data() -> None:
    server = Adaptation(without_data=(3,))
    line = next_step(with_command("", adaptation=server))
    assert "--without-data 3 --world 4 --workload vgg11" in line


def test_a_failure_in_one_line() -> None:
    line = summarize(REPORTS["mismatch"])
    assert line.startswith(
        "FAIL mine.py:sync, world 4, mlp float32: unexplained: gradients (bitwise), step 1, 7."
    )
    assert summarize(REPORTS["crash"]).endswith("crash: rank 2 raised an exception")


def test_the_headline_says_whose_steps_are_how_many() -> None:
    reports = [
        CaseReport(
            case=msgspec.structs.replace(case(workload=workload), steps=steps),
            strategy_file="",
            verdict="pass",
            outcomes=(),
            checks=(),
        )
        for workload, steps in (("exact", 12), ("cnn", 3))
    ]
    both = render_text(
        Report(environment=ENVIRONMENT, cases=tuple(reports)), width=200, verbose=True
    )
    assert "exact float32 (12 steps), cnn float32 (3 steps); batch 256, seed 0" in both
    one = render_text(
        Report(environment=ENVIRONMENT, cases=tuple(reports[:1])), width=200, verbose=True
    )
    assert "exact float32; batch 256, 12 steps, seed 0" in one


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("in separate interpreters: hash seed 7",
         "a second run in fresh interpreters is bit-identical"),
        ("not in separate interpreters: ranks on a GPU", "a second run is bit-identical"),
        ("in one process: ranks up to 7 ms delayed", "a second run is bit-identical"),
        (
            "in separate interpreters: hash seed 7; there the bits differ, caused only by nodes, "
            "and every check passes as well",
            "a second run in fresh interpreters is not bit-identical, caused only by nodes,",
        ),
    ],
)  # fmt: skip
def test_a_pass_says_of_its_rerun_what_it_was(reason: str, said: str) -> None:
    first, *_ = passed()
    first = msgspec.structs.replace(first, checks=(OUTCOME, check("rerun", "-", reason=reason)))
    text = render_text(Report(environment=ENVIRONMENT, cases=(first,)), width=100)
    assert f"      repeat  {said}" in text


def test_reruns_of_several_cases_are_not_taken_for_one() -> None:
    apart = "in separate interpreters: hash seed 7"
    other = f"{apart}; there the bits differ, caused only by nodes; of rank 0: 3 of 4 differ"
    assert brief._describe_reruns([apart, other]) == (
        "a second run in fresh interpreters is not bit-identical in 1 of 2 cases, caused only "
        "by nodes"
    )
    assert brief._describe_reruns([apart, f"not {apart}"]) == "a second run is bit-identical"


def test_quiet_keeps_the_cause() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, color_system=None, highlight=False)
    for name in ("several", "mismatch"):
        render(REPORTS[name], console, quiet=True)
    compare("quiet.txt", stream.getvalue())


def test_one_screen_is_one_screen() -> None:
    for name, report in REPORTS.items():
        for width in (100, 80):
            groups = len({case.case.sibling_key for case in report.cases})
            lines = render_text(report, width=width).splitlines()
            assert len(lines) <= 12 * groups + 3, name  # replay, saved, more


@pytest.mark.parametrize("name", REPORTS)
def test_json(name: str) -> None:
    text = render_json(REPORTS[name])
    json.loads(text)
    compare(f"{name}.json", text)


@pytest.mark.parametrize("width", [100, 80])
def test_the_screen_of_training(width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, color_system=None)
    trained = msgspec.structs.replace(
        case(workload="vgg11"), data="cifar10", strategy="mine.py:sync"
    )
    row = {
        "epoch": 1, "loss": 2.3026, "accuracy": 0.1012, "tested": 10_000, "steps": 195,
        "mean_step_s": 0.8123, "median_step_s": 0.8011, "max_step_s": 1.2345,
    }  # fmt: skip
    lines = [
        *training_report.format_heading(trained, "2.15.0+cpu", width=width),
        *training_report.epoch(row, 20, width=width),
        *training_report.epoch(
            {**row, "epoch": 20, "loss": 0.7164, "tested": 0, "steps": 1}, 20, width=width
        ),
    ]
    training_report.print_failure(trained, crash().outcomes, console)
    failure = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in [*lines, *failure[:-1]])
    assert failure[0].startswith("FAIL")
    assert len(failure) <= 12
    compare(f"train-{width}.txt", "\n".join([*lines, *failure]))


def test_markup_in_names_is_shown_as_it_is() -> None:
    odd = mismatch()
    text = render_text(
        Report(environment={**ENVIRONMENT, "cpu": "[red]x[/red]"}, cases=(odd,)), width=100,
        verbose=True,
    )  # fmt: skip
    assert "[red]x[/red]" in text


def test_marks_below_a_line_of_code_take_no_room() -> None:
    text = "\n".join(
        [*("line",) * 9, "    full = g + r", "           ~~^~~", "RuntimeError: sizes"]
    )
    raised = Outcome(rank=0, outcome="raised", step=1, phase="backward", text=text)
    ((_, shown),) = describe_rank_exits([raised], lines=4)
    assert shown.splitlines()[-2:] == ["    full = g + r", "RuntimeError: sizes"]
