"""Runs `distcheck selftest`, a test of distcheck itself on this machine. This module does not
import torch.
"""

import contextlib
import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import click
import msgspec
from rich.console import Console

from distcheck import backends
from distcheck.addons.selftest.records import (
    LIST,
    ListedMutant,
    SelftestVerdict,
    Zoo,
    detection_counts,
    judge_correct,
    judge_mutant,
)
from distcheck.addons.selftest.table import SelftestResults, render, render_json
from distcheck.cli.group import OnceCommand
from distcheck.cli.options import json_option, setting_option, setting_options
from distcheck.errors import CannotRunError, DistcheckError, ExitCode, NotSimulatedError, UsageError
from distcheck.machine import devices
from distcheck.records import Report
from distcheck.reports.files import check_writable, write_text
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for
from distcheck.testing.verifying import verify
from distcheck.training.loading import load_strategy, strategy_names
from distcheck.verification.run import shared_pool
from distcheck.worlds.jobs import Descriptors, Reporter
from distcheck.worlds.launch import run_job

WORLDS = (2, 3)
WORKLOADS = ("exact", "mlp")  # their cases take one second each
BACKENDS = ("gloo", "simulated")
_QUICK_STRATEGIES = ("allreduce", "ddp")


class SelftestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The mutants to run, and the correct strategies, each of which runs as several cases.

    `dtype` applies to the correct cases. None means the default of `verify`, which adds float64.
    """

    backend: str = "gloo"
    device: str = "cpu"

    mutants: tuple[ListedMutant, ...]
    strategies: tuple[str, ...]
    elsewhere: tuple[tuple[str, str], ...]
    dtype: str | None = None

    @property
    def cases_each(self) -> int:
        """Number of correct cases per strategy. The workload `exact` runs in float32 only."""
        return len(WORLDS) * (2 if self.dtype else 3)


def check_place(backend: str, device: str) -> None:
    """Raise UsageError for an unknown device, or a backend for which no results are listed. Raise
    CannotRunError if the device is missing.
    """
    backends.check_name(backend)
    if backend not in BACKENDS:
        raise UsageError(
            f"--backend {backend}: the check that must catch each mutant is known only for "
            f"gloo's reduction order; expected {' or '.join(BACKENDS)}"
        )
    if device not in devices.DEVICES:
        raise UsageError(f"unknown --device {device!r}; known are {' and '.join(devices.DEVICES)}")
    if why := devices.why_device_unavailable(device, backend):
        raise CannotRunError(why)


def plan_selftest(
    zoo: Zoo,
    *,
    patterns: Sequence[str] = (),
    quick: bool = False,
    backend: str = "gloo",
    device: str = "cpu",
) -> SelftestPlan:
    """Select mutants and strategies by name, and fewer with `quick`. Raises UsageError if a pattern
    matches none.
    """
    names = [f"{m.file}.{m.name}" for m in zoo.mutants]
    names += [f"correct.{strategy}" for strategy in zoo.strategies]
    for pattern in patterns:
        if not any(_matches_patterns(name, [pattern]) for name in names):
            first = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UsageError(
                f"-k {pattern}: no mutant and no correct strategy has such a name; names begin "
                f"with {first}, for example {names[0]}"
            )
    mutants = tuple(m for m in zoo.mutants if _matches_patterns(f"{m.file}.{m.name}", patterns))
    strategies = tuple(s for s in zoo.strategies if _matches_patterns(f"correct.{s}", patterns))
    if quick:
        mutants = representative_mutants(mutants)
        quickest = tuple(s for s in strategies if s in _QUICK_STRATEGIES)
        strategies = quickest or strategies[:1]
    return SelftestPlan(
        backend=backend,
        device=device,
        mutants=mutants,
        strategies=strategies,
        elsewhere=zoo.elsewhere,
        dtype="float32" if quick else None,
    )


def representative_mutants(mutants: Sequence[ListedMutant]) -> tuple[ListedMutant, ...]:
    """Return few mutants that together have every (check, layer) pair with which any mutant is
    listed.

    Rare pairs are handled first, because the mutants selected for them also cover common pairs.
    """
    having: dict[tuple[str, str], list[ListedMutant]] = {}
    for mutant in mutants:
        for pair in mutant.caught:
            having.setdefault(pair, []).append(mutant)
    chosen: list[ListedMutant] = []
    for pair in sorted(having, key=lambda p: (len(having[p]), p)):
        if not any(pair in mutant.caught for mutant in chosen):
            chosen.append(min(having[pair], key=_sort_key))
    return tuple(mutant for mutant in mutants if mutant in chosen)


def _sort_key(mutant: ListedMutant) -> tuple[int, bool, int]:
    """Return a sort key: mutants with few failing checks come first. Mutants that hang come last,
    because they run until the deadline.
    """
    return len(mutant.caught), "hang" in mutant.causes, mutant.asked["world"]


def _matches_patterns(name: str, patterns: Sequence[str]) -> bool:
    lowered = [pattern.lower() for pattern in patterns]
    return not patterns or any(fnmatchcase(name.lower(), f"*{pattern}*") for pattern in lowered)


PACKAGE = "distcheck_mutants"
_BUILT_IN = "distcheck_strategies"  # strategies of the user may be incorrect


@LIST.does
def list_zoo(nothing: bytes, fds: Descriptors, reporter: Reporter) -> Zoo:
    """Return every mutant, and every built-in strategy that runs on gloo and the CPU."""
    planted = [*_listed_mutants(PACKAGE), *_listed_mutants(f"{PACKAGE}.subtle")]
    here, elsewhere = [], []
    for name, point in sorted(strategy_names().items()):
        if point.module.partition(".")[0] != _BUILT_IN:
            continue
        contract = load_strategy(name).contract
        if contract.device not in (None, "cpu"):
            elsewhere.append((name, f"needs device {contract.device}"))
        elif contract.backend not in (None, "gloo"):
            elsewhere.append((name, f"needs backend {contract.backend}"))
        elif contract.parallel:
            elsewhere.append((name, "shards a model's layers; use distcheck verify"))
        else:
            here.append(name)
    return Zoo(mutants=tuple(planted), strategies=tuple(here), elsewhere=tuple(elsewhere))


def _listed_mutants(package: str) -> Iterator[ListedMutant]:
    """Yield the mutants of a package. Most are listed with the checks that must fail. A subtle
    mutant is listed with the one case that exposes it; any check may fail.
    """
    subtle = package != PACKAGE
    causes = importlib.import_module(f"{package}.causes")
    for mutant in importlib.import_module(package).everything():
        if mutant.asked is None:
            continue
        place = mutant.spec.partition(":")[0].rpartition(".")[2]
        yield ListedMutant(
            name=mutant.name,
            file=f"subtle.{mutant.group}" if subtle else place,
            asked=mutant.asked,
            caught=() if subtle else tuple(sorted(mutant.caught)),
            causes=tuple(sorted(causes.CAUSES[mutant.name])),
            processes=not subtle and mutant.processes,
            when_simulated=tuple(sorted(causes.WHEN_SIMULATED.get(mutant.name, ()))),
        )


_OF_PROCESSES = "it is visible only if ranks are processes; pass --backend gloo"


def installed_zoo() -> Zoo:
    """Return the installed mutants and strategies. Raises CannotRunError without mutants."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise CannotRunError(
            f"the mutants are not installed; their package {PACKAGE} comes with distcheck; "
            "install distcheck again, from its wheel or a checkout"
        )
    return run_job(shared_pool(), LIST, b"")


def run_plan(
    plan: SelftestPlan, *, begins: Callable[[str], None], environment: dict[str, object]
) -> Iterator[SelftestVerdict]:
    """Run everything in the plan and yield the verdicts. `begins` is called with the name of each
    mutant or strategy before it runs. `environment` is filled with the machine's description from
    the first report.
    """
    for planted in plan.mutants:
        begins(f"{planted.file}.{planted.name}")
        yield _run_mutant(planted, plan, environment)
    for strategy in plan.strategies:
        begins(f"correct.{strategy}")
        yield from _run_correct(strategy, plan, environment)


def _run_mutant(
    planted: ListedMutant, plan: SelftestPlan, environment: dict[str, object]
) -> SelftestVerdict:
    begun = time.monotonic()
    row = SelftestVerdict(kind="mutant", name=planted.name, file=planted.file)
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
    _keep_environment(environment, report)
    return judge_mutant(planted, report, seconds=time.monotonic() - begun)


def _run_correct(
    strategy: str, plan: SelftestPlan, environment: dict[str, object]
) -> list[SelftestVerdict]:
    begun = time.monotonic()
    try:
        report = verify(
            strategy, world=WORLDS, workload=WORKLOADS, dtype=plan.dtype, steps=3,
            backend=plan.backend, device=plan.device,
        )  # fmt: skip
    except NotSimulatedError as error:
        out = SelftestVerdict(
            kind="correct", name=strategy, file=strategy, verdict="left out", detail=str(error)
        )
        return [out] * plan.cases_each
    except DistcheckError as error:
        return [SelftestVerdict(kind="correct", name=strategy, file=strategy, detail=str(error))]
    _keep_environment(environment, report)
    each = round((time.monotonic() - begun) / len(report.cases), 3)
    rows = [judge_correct(case) for case in report.cases]
    timed = [msgspec.structs.replace(row, seconds=each) for row in rows]
    return timed + [
        SelftestVerdict(kind="correct", name=name, file=strategy, verdict="left out", detail=why)
        for name, why in report.left_out.items()
    ]


def _keep_environment(environment: dict[str, object], report: Report) -> None:
    if not environment:
        environment.update(report.environment)


@click.command("selftest", cls=OnceCommand)
@click.option(
    "--quick",
    is_flag=True,
    help=("Run one mutant for each check and comparison, and two strategies."),
)
@click.option(
    "-k",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Run only mutants whose displayed name contains this text, with wildcards * and ?.",
)
@setting_option(
    "backend", help="Backend: gloo; or simulated, whose ranks are threads of one process."
)
@setting_options("device")
@json_option("table")
@click.option("-v", "--verbose", is_flag=True, help="Print every correct case.")
def command(
    *,
    quick: bool,
    patterns: tuple[str, ...],
    backend: str,
    device: str,
    json_file: str | None,
    verbose: bool,
) -> int:
    """Run the mutant zoo: check that every planted bug is caught and named, and that correct code
    passes.

    \b
    distcheck selftest
    distcheck selftest --quick
    distcheck selftest --backend simulated
    distcheck selftest -k scale -k ddp
    """  # fmt: skip
    check_place(backend, device)
    check_writable(json_file)
    begun = time.monotonic()
    rows: list[SelftestVerdict] = []
    environment: dict[str, Any] = {}
    try:
        with LiveProgress(Console(stderr=True)) as live:
            live.preparing("inspecting the mutants")
            plan = plan_selftest(
                installed_zoo(), patterns=patterns, quick=quick, backend=backend, device=device
            )
            interrupted = True
            with contextlib.suppress(KeyboardInterrupt):
                _run(plan, rows, environment, live)
                interrupted = False
    finally:
        shared_pool().close()
    found = SelftestResults(
        backend=backend,
        device=device,
        rows=tuple(rows),
        counts=detection_counts(
            rows,
            planted=len(plan.mutants),
            correct=len(plan.strategies) * plan.cases_each,
        ),
        environment=environment,
        elsewhere=plan.elsewhere if plan.strategies else (),
        interrupted=interrupted,
        seconds=time.monotonic() - begun,
    )
    return _show(found, json_file=json_file, verbose=verbose)


def _run(
    plan: SelftestPlan, rows: list[SelftestVerdict], environment: dict[str, Any], live: LiveProgress
) -> None:
    """Append verdicts to `rows` one by one, so that they remain available after an interrupt."""
    total = len(plan.mutants) + len(plan.strategies)
    numbers = itertools.count()

    def begins(name: str) -> None:
        live.counted(next(numbers), total, name)

    for row in run_plan(plan, begins=begins, environment=environment):
        rows.append(row)  # noqa: PERF402


def _show(found: SelftestResults, *, json_file: str | None, verbose: bool) -> int:
    if json_file != "-":
        render(found, console_for(), verbose=verbose)
    if json_file is not None:
        write_text(json_file, render_json(found))
    if not found.interrupted:
        return int(found.counts.exit_code)
    planned = found.counts.planted + found.counts.correct
    click.echo(
        f"distcheck: interrupted after {planned - found.counts.unknown} of {planned}; nothing is "
        "left running",
        err=True,
    )
    return int(ExitCode.INTERRUPTED)
