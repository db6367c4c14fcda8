"""Runs a planned self-test, one verification after the other, on one helper."""

import importlib.util
import time
from collections.abc import Callable, Iterator

import msgspec

from distcheck.errors import CannotRunError, DistcheckError, NotSimulatedError
from distcheck.records import Report
from distcheck.selftest.planning import WORKLOADS, WORLDS, Plan
from distcheck.selftest.records import LIST, Planted, Row, Zoo, judge_correct, judge_mutant
from distcheck.selftest.zoo import PACKAGE
from distcheck.testing.verifying import verify
from distcheck.verification.run import shared_pool
from distcheck.worlds.launch import run_job

_OF_PROCESSES = "it shows only where ranks are processes; give --backend gloo"


def look() -> Zoo:
    """What is installed. Raises CannotRunError where the mutants are not."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise CannotRunError(
            f"the mutants are not installed; their package {PACKAGE} comes with distcheck; "
            "install distcheck again, from its wheel or a checkout"
        )
    return run_job(shared_pool(), LIST, b"")


def run_plan(
    plan: Plan, *, begins: Callable[[str], None], environment: dict[str, object]
) -> Iterator[Row]:
    """Judges everything that is planned; `begins` is called with the name of what comes next.

    `environment` is filled with what the first report says of the machine.
    """
    for planted in plan.mutants:
        begins(f"{planted.file}.{planted.name}")
        yield _run_mutant(planted, plan, environment)
    for strategy in plan.strategies:
        begins(f"correct.{strategy}")
        yield from _run_correct(strategy, plan, environment)


def _run_mutant(planted: Planted, plan: Plan, environment: dict[str, object]) -> Row:
    begun = time.monotonic()
    row = Row(kind="mutant", name=planted.name, file=planted.file)
    if plan.backend == "simulated":
        if planted.processes:
            return msgspec.structs.replace(row, verdict="left out", detail=_OF_PROCESSES)
        if planted.when_simulated:
            planted = msgspec.structs.replace(planted, causes=planted.when_simulated, caught=())
    try:
        report = verify(**planted.asked, backend=plan.backend, device=plan.device)
    except NotSimulatedError as error:
        return msgspec.structs.replace(row, verdict="left out", detail=str(error))
    except DistcheckError as error:
        return msgspec.structs.replace(row, detail=str(error))
    _note(environment, report)
    return judge_mutant(planted, report, seconds=time.monotonic() - begun)


def _run_correct(strategy: str, plan: Plan, environment: dict[str, object]) -> list[Row]:
    begun = time.monotonic()
    try:
        report = verify(
            strategy, world=WORLDS, workload=WORKLOADS, dtype=plan.dtype, steps=3,
            backend=plan.backend, device=plan.device,
        )  # fmt: skip
    except NotSimulatedError as error:
        out = Row(
            kind="correct", name=strategy, file=strategy, verdict="left out", detail=str(error)
        )
        return [out] * plan.cases_each
    except DistcheckError as error:
        return [Row(kind="correct", name=strategy, file=strategy, detail=str(error))]
    _note(environment, report)
    each = round((time.monotonic() - begun) / len(report.cases), 3)
    rows = [judge_correct(case) for case in report.cases]
    timed = [msgspec.structs.replace(row, seconds=each) for row in rows]
    return timed + [
        Row(kind="correct", name=name, file=strategy, verdict="left out", detail=why)
        for name, why in report.left_out.items()
    ]


def _note(environment: dict[str, object], report: Report) -> None:
    if not environment:
        environment.update(report.environment)
