"""`distcheck selftest`, from options to an exit code. Imports no torch."""

import contextlib
import itertools
import time
from typing import Any

import click
from rich.console import Console

from distcheck.errors import ExitCode
from distcheck.reports.files import check_writable, write_text
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for
from distcheck.selftest.planning import Plan, check_place, plan_selftest
from distcheck.selftest.records import Row, count
from distcheck.selftest.running import look, run_plan
from distcheck.selftest.table import Detection, render, render_json
from distcheck.verification.run import shared_pool


def selftest_command(
    *,
    quick: bool,
    patterns: tuple[str, ...],
    backend: str,
    device: str,
    json_file: str | None,
    verbose: bool,
) -> int:
    """Runs the zoo and shows the table; returns the exit code."""
    check_place(backend, device)
    check_writable(json_file)
    begun = time.monotonic()
    rows: list[Row] = []
    environment: dict[str, Any] = {}
    try:
        with LiveProgress(Console(stderr=True)) as live:
            live.preparing("looking at the zoo")
            plan = plan_selftest(
                look(), patterns=patterns, quick=quick, backend=backend, device=device
            )
            interrupted = True
            with contextlib.suppress(KeyboardInterrupt):
                _run(plan, rows, environment, live)
                interrupted = False
    finally:
        shared_pool().close()
    found = Detection(
        backend=backend,
        device=device,
        rows=tuple(rows),
        counts=count(
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


def _run(plan: Plan, rows: list[Row], environment: dict[str, Any], live: LiveProgress) -> None:
    """Fills `rows` one by one, so that they are there if this is interrupted."""
    total = len(plan.mutants) + len(plan.strategies)
    numbers = itertools.count()

    def begins(name: str) -> None:
        live.counted(next(numbers), total, name)

    for row in run_plan(plan, begins=begins, environment=environment):
        rows.append(row)  # noqa: PERF402


def _show(found: Detection, *, json_file: str | None, verbose: bool) -> int:
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
