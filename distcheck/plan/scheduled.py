"""Checks options for schedules of a simulated world, and plans the case that searches schedules."""

from collections.abc import Callable

import msgspec

from distcheck import backends
from distcheck.errors import UsageError
from distcheck.plan.settings import Request
from distcheck.records import Case
from distcheck.records.schedules import parse_schedule

_WORKLOAD = "mlp:small"  # the default: a schedule costs least there
_STEPS = 2  # the second begins with the calls that the first left in flight
_MOST, _MOST_PREEMPTIONS = 10**6, 10
_ENUMERATED = 1000  # the default number of schedules with --preemptions alone


def check_schedules(
    schedules: int, schedule: str | None, backend: str, *, preemptions: int = 0
) -> None:
    if not 0 <= schedules <= _MOST:
        raise UsageError(f"--schedules {schedules} is out of range; it takes 0 to {_MOST}")
    if not 0 <= preemptions <= _MOST_PREEMPTIONS:
        raise UsageError(
            f"--preemptions {preemptions} is out of range; it takes 0 to {_MOST_PREEMPTIONS}"
        )
    if schedule is not None:
        parse_schedule(schedule)
    given = {"--schedules": schedules, "--preemptions": preemptions, "--schedule": schedule}
    asked = next((name for name, value in given.items() if value), "")
    if asked and backends.name_of(backend) != "simulated":
        raise UsageError(f"{asked} needs ranks that distcheck schedules; add --backend simulated")


def check_schedule_options(asked: Request) -> None:
    check_schedules(asked.schedules, asked.schedule, asked.backend, preemptions=asked.preemptions)


def number_of_schedules(schedules: int, preemptions: int) -> int:
    return schedules or (_ENUMERATED if preemptions else 0)


def schedule_search_cases(asked: Request, case_of: Callable[[str, str], Case]) -> list[Case]:
    """Return the case whose schedules are searched, or nothing if no search is requested.

    `case_of` makes the case from a workload and a dtype. Its schedules replace its rerun. It is the
    first case of its strategy and world, so that the search can explain a hang.
    """
    schedules = number_of_schedules(asked.schedules, asked.preemptions)
    if not schedules:
        return []
    case = case_of((*asked.workloads, _WORKLOAD)[0], asked.dtype or "float32")
    steps = _STEPS if asked.steps is None else asked.steps
    return [
        msgspec.structs.replace(
            case,
            id=f"{case.id}-schedules",
            steps=steps,
            schedules=schedules,
            preemptions=asked.preemptions,
            rerun=False,
        )
    ]
