"""Documents of runs, as services are told of them: passed, failed, crashed and unknown."""

import json
from typing import Any

import msgspec

from distcheck.records import (
    Case,
    CaseReport,
    CheckResult,
    Compared,
    Diagnosis,
    Difference,
    Outcome,
    Report,
    RunPlan,
    VerdictName,
)
from distcheck.reports.json_report import as_document, render

Document = dict[str, Any]
COMPARED = Compared(tensors=1, elements=6, ranks=2, steps=3)


def case_report(
    strategy: str, verdict: VerdictName, *, world: int = 2, outcome: str = "finished",
    detail: str = "", reason: str = "", file: str = "/there/repo/sync.py", name: str = "",
) -> CaseReport:  # fmt: skip
    place = Difference(
        parameter="fc.weight", rank=1, step=2, index=(0, 3), actual=2.0, expected=1.0, error=1.0,
        bound=1e-9,
    )  # fmt: skip
    ranks = msgspec.convert(
        [
            {"rank": rank, "outcome": "finished" if rank != 1 else outcome}
            | ({"text": detail} if rank == 1 else {})
            for rank in range(world)
        ],
        tuple[Outcome, ...],
    )
    failed = verdict == "fail" and outcome == "finished"
    return CaseReport(
        case=Case(
            id=name or f"{strategy}-w{world}", strategy=strategy, world=world, workload="mlp"
        ),
        strategy_file=file,
        strategy_line=8,
        verdict=verdict,
        outcomes=ranks,
        checks=(
            CheckResult(check="outcome", layer="-", verdict="fail" if verdict == "fail" and not
                        failed else "pass", compared=Compared(ranks=world),
                        reason=reason if not failed else ""),
            CheckResult(check="data", layer="-", verdict="pass",
                        compared=Compared(elements=768, ranks=world, steps=3)),
            CheckResult(check="initial state", layer="-", verdict="pass",
                        compared=Compared(tensors=1, elements=world, ranks=world, steps=1)),
            CheckResult(check="gradients", layer="rounding", verdict=verdict, compared=COMPARED,
                        first=place if failed else None, reason=reason),
            CheckResult(check="agreement", layer="-", verdict="pass", compared=COMPARED),
        ),
        diagnosis=(Diagnosis(cause="missing-division", evidence="twice the mean",
                             suggestion="divide"),) if failed else (),
        timings_s={"world": 0.5, "judge": 0.25},
        replay=f"distcheck replay run/cases/{strategy}.json",
    )  # fmt: skip


def document_of(
    *cases: CaseReport, shard: int = 0, shards: int = 1, plan: tuple[CaseReport, ...] = (),
    interrupted: bool = False, left_out: dict[str, str] | None = None, digest: str = "d",
) -> Document:  # fmt: skip
    """The document of a run of `cases`, part `shard` of a plan that deals `plan` out in turn."""
    planned = tuple(c.case for c in plan or cases)
    assigned = {case.id: n % shards + 1 for n, case in enumerate(planned)}
    whole = RunPlan(digest=digest, shard=shard, shards=shards, cases=planned, assigned=assigned)
    report = Report(
        environment={"torch": "2.13.0"}, cases=cases, plan=whole, interrupted=interrupted,
        left_out=left_out or {},
    )  # fmt: skip
    return json.loads(render(as_document(report)))  # type: ignore[no-any-return]


PASSED = case_report("ddp", "pass")
FAILED = case_report("sync.py:f", "fail")
CRASHED = case_report("sync.py:f", "fail", world=3, outcome="raised", detail="Traceback\nboom")
UNKNOWN = case_report("sync.py:f", "unknown", world=4, reason="compared only 1 of 3 steps")
ALL = (PASSED, FAILED, CRASHED, UNKNOWN)


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as the runner reads it (actions/runner, ActionCommand.cs)."""

    def unescape(text: str, *more: tuple[str, str]) -> str:
        for code, character in (*more, ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, character)
        return text

    command, _, data = line.removeprefix("::").partition("::")
    name, _, words = command.partition(" ")
    properties = {}
    for word in words.split(","):
        key, _, value = word.partition("=")
        properties[key] = unescape(value, ("%3A", ":"), ("%2C", ","))
    return name, properties, unescape(data)
