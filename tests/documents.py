"""Reports as fixed documents, for tests of what is made of them and for bench/html_report.py."""

import math
from typing import Any

from distcheck.records import (
    Case,
    CaseReport,
    Change,
    ChangesSinceLastPass,
    CheckResult,
    Collective,
    Compared,
    Diagnosis,
    Difference,
    Outcome,
    Report,
)
from distcheck.reports.json_report import as_document

ENVIRONMENT = {
    "distcheck": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "backend": "gloo",
    "device": "cpu", "threads": 1, "cpu": "A Processor", "libraries": {"xxhash": "4.1.0"},
}  # fmt: skip
TORCH_CHANGED = Change(kind="software", name="torch", then="2.12.1", now="2.13.0")
HOSTILE = (
    "</pre></style><script>alert('x')</script>"
    "<img src=//evil.example/a.png onerror=alert(1)>&amp;{{7*7}}\"'"
)
VGG11 = [
    *(f"features.{at}.{part}" for at in range(16) for part in ("weight", "bias")),
    "classifier.weight", "classifier.bias",
]  # fmt: skip


def share(row: int, step: int) -> float:
    """A share of a bound that looks like one."""
    return 0.5 + 0.45 * math.sin(0.9 * row + 0.37 * step)


def heat(names: list[str], steps: int, *, wrong: tuple[str, int] | None = None) -> dict[str, Any]:
    shares: dict[str, dict[int, float | str]] = {
        name: {step: share(row, step) for step in range(steps)} for row, name in enumerate(names)
    }
    if wrong is not None:
        name, since = wrong
        shares[name] |= {step: 3.5 + step for step in range(since, steps)}
    return {"shares": shares, "in_bits": False}


def mask(names: list[str], steps: int, *, wrong: tuple[str, int] | None = None) -> dict[str, Any]:
    shares: dict[str, dict[int, float | str]] = {n: dict.fromkeys(range(steps), 0.0) for n in names}
    if wrong is not None:
        shares[wrong[0]] |= dict.fromkeys(range(wrong[1], steps), "inf")
    return {"shares": shares}


def check(
    name: str, layer: str, verdict: str = "pass", sums: dict[str, Any] | None = None, *,
    ranks: int = 4, steps: int = 3, **more: Any,
) -> CheckResult:  # fmt: skip
    return CheckResult(
        check=name,
        layer=layer,
        verdict=verdict,  # type: ignore[arg-type]
        compared=Compared(tensors=34, elements=4_014_456, ranks=ranks, steps=steps),
        **(sums or {}),
        **more,
    )


def place(name: str, step: int) -> Difference:
    return Difference(
        parameter=name, rank=2, step=step, index=(0, 5), actual=0.002836949657648802,
        expected=0.002836946790921502, actual_bits="3b39ec1e", expected_bits="3b39ec12",
        error=2.9e-9, bound=9e-10, ulp=12,
    )  # fmt: skip


def case(strategy: str, world: int, workload: str, dtype: str, steps: int) -> Case:
    return Case(
        id=f"{strategy}-w{world}-{workload}-{dtype}", strategy=strategy, world=world,
        workload=workload, dtype=dtype, steps=steps,
    )  # fmt: skip


def passing(
    strategy: str = "allreduce", world: int = 4, dtype: str = "float32", steps: int = 3
) -> CaseReport:
    names = VGG11[:8]
    checks = (
        check("outcome", "-", ranks=world),
        check("data", "-", ranks=world, steps=steps),
        check("initial state", "-", ranks=world, steps=1),
        check("gradients", "bitwise", sums=mask(names, steps)),
        check("gradients", "rounding", sums=heat(names, steps)),
        check("loss", "full batch float32"),
        check("agreement", "-"),
    )
    return CaseReport(
        case=case(strategy, world, "cnn", dtype, steps), strategy_file="allreduce.py",
        verdict="pass",
        outcomes=tuple(Outcome(rank=rank, outcome="finished") for rank in range(world)),
        checks=checks, timings_s={"world": 1.25, "judge": 0.5},
        replay="distcheck replay cases/allreduce.json", notes=("uneven shards",),
    )  # fmt: skip


def mismatch(strategy: str = "mine.py:sync", steps: int = 3) -> CaseReport:
    names, wrong = VGG11[:8], (VGG11[3], 1)
    at = place(*wrong)
    checks = (
        check("outcome", "-"),
        check("gradients", "bitwise", "fail", mask(names, steps, wrong=wrong), worst=at, first=at),
        check("gradients", "rounding", "fail", heat(names, steps, wrong=wrong), worst=at, first=at),
        check(
            "loss",
            "full batch float32",
            "fail",
            reason="the loss exceeds its bound",
        ),
        check("agreement", "-", "fail", first=at),
    )
    return CaseReport(
        case=case(strategy, 4, "cnn", "float32", steps),
        strategy_file="mine.py",
        verdict="fail",
        outcomes=tuple(Outcome(rank=rank, outcome="finished") for rank in range(4)),
        checks=checks,
        diagnosis=(
            Diagnosis(
                cause="partial-sync",
                evidence=f"step 1, parameter {wrong[0]} (1 of 8): rank 2 holds its local gradient",
                suggestion="check the code that selects the parameters to reduce",
            ),
        ),
        replay="distcheck replay cases/mine.json",
    )


def crash(text: str = "the reason", name: str = "all_reduce") -> CaseReport:
    def calls(last: int, shapes: str = "64") -> tuple[Collective, ...]:
        usual = [
            Collective(number=n, name=name, shapes="64x128", group="0") for n in range(1, last)
        ]
        return (
            *usual,
            Collective(number=last, name=name, shapes=shapes, group="0", finished=False),
        )

    outcomes = (
        Outcome(
            rank=1,
            outcome="raised",
            step=1,
            phase="sync",
            text=text,
            error=text,
            collectives=calls(6, "64x128"),
        ),
        Outcome(rank=2, outcome="ended", step=1, phase="sync", collectives=calls(7, "10x64")),
        Outcome(rank=0, outcome="ended", step=1, phase="sync", collectives=calls(7)),
        Outcome(rank=4, outcome="ended", step=1, phase="sync", collectives=calls(7)),
        Outcome(rank=3, outcome="killed", step=1, phase="sync", ended_by="killed by SIGKILL"),
    )
    return CaseReport(
        case=case("crashes.py:sync", 5, "mlp", "float32", 3),
        strategy_file="crashes.py",
        verdict="fail",
        outcomes=outcomes,
        checks=(
            check("outcome", "-", "fail", reason="rank 1 raised"),
            check("gradients", "rounding", "unknown", reason="not judged"),
        ),
        diagnosis=(
            Diagnosis(
                cause="crash",
                evidence="rank 1 raised an exception",
                suggestion="read rank 1's traceback first",
            ),
        ),
        replay="distcheck replay cases/crashes.json",
    )


def vgg11(steps: int = 60, world: int = 4) -> CaseReport:
    """Every picture at the size of a long run: 34 parameters, 60 steps."""
    state = [*VGG11, *(f"{name}/momentum_buffer" for name in VGG11)]
    wrong = (VGG11[9], 41)
    at = place(*wrong)
    checks = (
        check("outcome", "-"),
        check("data", "-"),
        check("initial state", "-", sums=mask(VGG11, 1)),
        check("local gradients", "bitwise", sums=mask(VGG11, steps)),
        check("gradients", "bitwise", "fail", mask(VGG11, steps, wrong=wrong), worst=at, first=at),
        check("gradients", "rounding", "fail", heat(VGG11, steps, wrong=wrong), worst=at, first=at),
        check("gradients", "full batch float32", sums=heat(VGG11, steps)),
        check("loss", "bitwise"),
        check("loss", "full batch float32"),
        check("parameters", "bitwise", "fail", mask(state, steps, wrong=wrong), first=at),
        check("buffers", "-", sums=mask(VGG11, steps)),
        check("agreement", "-", "fail", first=at),
        check("rerun", "-", "fail", mask(state, steps, wrong=wrong), first=at),
    )
    return CaseReport(
        case=case("mine.py:sync", world, "vgg11", "float32", steps),
        strategy_file="mine.py",
        verdict="fail",
        outcomes=tuple(Outcome(rank=rank, outcome="finished") for rank in range(world)),
        checks=checks,
        diagnosis=(
            Diagnosis(
                cause="unexplained",
                evidence=f"gradients diverge first: {at.place}",
                suggestion="start at that step: everything compared before it agreed",
            ),
        ),
        replay="distcheck replay cases/mine-w4-vgg11-float32.json",
    )


def hostile(text: str = HOSTILE) -> CaseReport:
    """Strings that a strategy, a rank's output or a machine can put into a report."""
    report = crash(text=text, name=text)
    names = [text, f"{text}.weight"]
    wrong = place(text, 1)
    return CaseReport(
        case=case(text, 5, text, text, 3),
        strategy_file=text,
        verdict="fail",
        outcomes=report.outcomes,
        checks=(
            check(text, text, "fail", heat(names, 3, wrong=(text, 1)), first=wrong),
            check("gradients", "bitwise", "fail", mask(names, 3, wrong=(text, 1)), reason=text),
        ),
        diagnosis=(Diagnosis(cause=text, evidence=text, suggestion=text),),
        timings_s={text: 1.0},
        replay=text,
        notes=(text,),
    )


def document(*cases: CaseReport, changed: bool = True, **environment: Any) -> dict[str, Any]:
    """The document of a report with these cases."""
    changes = (TORCH_CHANGED,) if changed else ()
    since = ChangesSinceLastPass(run="20260131-120000-4711", changes=changes)
    return as_document(
        Report(
            environment={**ENVIRONMENT, **environment},
            cases=cases,
            since_green=since,
            not_shown=("world sizes other than 4",),
        )
    )
