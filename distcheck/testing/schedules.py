"""In the pytest process: a test that has passed in a simulated world, under other schedules."""

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import pytest

from distcheck.errors import DistcheckError
from distcheck.judge.schedules import found_by, timelines
from distcheck.plan.scheduled import how_many
from distcheck.records.ends import RankEnd
from distcheck.records.schedules import Searched
from distcheck.testing import failures, timeouts
from distcheck.testing.failures import Ended
from distcheck.testing.marker import WorldOptions
from distcheck.testing.messages import RUN
from distcheck.testing.waiting import ranks_of
from distcheck.worlds.launch import search_schedules
from distcheck.worlds.pool import Pool


def search(
    pool: Pool,
    item: pytest.Function,
    options: WorldOptions,
    run_again: Callable[[WorldOptions], Ended],
) -> None:
    """Fails the test if it fails under another schedule; `run_again` gives the report of one."""
    __tracebackhide__ = True
    try:
        found = search_schedules(
            pool,
            ranks_of(options, RUN),
            schedules=how_many(options.schedules, options.switches),
            switches=options.switches,
            look=lambda: timeouts.check(item),
        )
    except DistcheckError as error:
        raise pytest.fail.Exception(f"schedules could not be run: {error}", pytrace=False) from None
    if why := _why_not_compared(found):
        _refuse(why)
    if found.other is not None:
        _fail(found, item, options, run_again)


def _why_not_compared(found: Searched) -> str:
    """Why schedules show nothing, although the test has passed; empty where they do."""
    for run in (found.usual, found.again):
        if run.end != "finished":
            return (
                f"the test passed, and ended in a {run.end} when it was run again under the same "
                f"schedule ({run.what}): it depends on something that no schedule controls, such "
                "as the clock, or the system's random numbers"
            )
    if found.other is not None and not found.repeats:
        return (
            f"the test passed, and ended in a {found.other.end} under schedule "
            f"{found.other.schedule} ({found.other.what}), but not each time: it depends on "
            "something that no schedule controls, such as the clock, or the system's random numbers"
        )
    if found.other is None and found.late:
        return (
            f"{len(found.late)} of {found.ran} schedules did not end in time (first "
            f"{found.late[0]}); give a longer deadline_s"
        )
    return ""


def _fail(
    found: Searched,
    item: pytest.Function,
    options: WorldOptions,
    run_again: Callable[[WorldOptions], Ended],
) -> None:
    __tracebackhide__ = True
    other = found.other
    assert other is not None
    marker = f'@pytest.mark.world({options.size}, backend="{options.backend}", '
    said = (
        f"passed under the usual schedule, and failed under schedule {other.schedule} "
        f"({found_by(found)})"
    )
    text = "\n".join(
        [
            said,
            f'run it again: {marker}schedule="{other.schedule}")',
            *timelines(found.usual, other),
        ]
    )
    ended = run_again(replace(options, schedule=other.schedule, schedules=0, switches=0))
    if all(outcome.outcome == RankEnd.FINISHED for outcome in ended.outcomes):
        _refuse(f"{text}\nit ended in a {other.end} ({other.what}), and passed when run again")
    failure = failures.failure_of(ended, item.config)
    assert failure.longrepr is not None
    failure.longrepr.addsection("schedule", text)
    raise failure


def _refuse(text: str) -> NoReturn:
    pytest.fail(text, pytrace=False)
