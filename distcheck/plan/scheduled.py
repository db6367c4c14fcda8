"""Schedules of a simulated world, as they are asked for, and the case that is searched for them."""

from collections.abc import Callable

import msgspec

from distcheck import backends
from distcheck.errors import UsageError
from distcheck.plan.request import Request
from distcheck.records import Case
from distcheck.records.schedules import read_schedule

_WORKLOAD = "mlp:small"  # where none was given: a schedule costs least there
_STEPS = 2  # the second begins with what the first has left in flight
_MOST, _MOST_SWITCHES = 10**6, 10
_ENUMERATED = 1000  # schedules, where only their switches are given


def check_schedules(
    schedules: int, schedule: str | None, backend: str, *, switches: int = 0
) -> None:
    """Raises UsageError for what cannot be run."""
    if not 0 <= schedules <= _MOST:
        raise UsageError(f"--schedules {schedules} is out of range; it takes 0 to {_MOST}")
    if not 0 <= switches <= _MOST_SWITCHES:
        raise UsageError(f"--switches {switches} is out of range; it takes 0 to {_MOST_SWITCHES}")
    if schedule is not None:
        read_schedule(schedule)
    given = {"--schedules": schedules, "--switches": switches, "--schedule": schedule}
    asked = next((name for name, value in given.items() if value), "")
    if asked and backends.name_of(backend) != "simulated":
        raise UsageError(f"{asked} needs ranks that distcheck schedules; add --backend simulated")


def check_request(asked: Request) -> None:
    """Raises UsageError for what cannot be run."""
    check_schedules(asked.schedules, asked.schedule, asked.backend, switches=asked.switches)


def how_many(schedules: int, switches: int) -> int:
    return schedules or (_ENUMERATED if switches else 0)


def searched(asked: Request, case_of: Callable[[str, str], Case]) -> list[Case]:
    """The case that is searched, if one was asked for; `case_of` makes it of a workload and dtype.
    It has no rerun: the schedules take its place. It is the first of its strategy and world, so
    that one that hangs is named by what its schedules show.
    """
    schedules = how_many(asked.schedules, asked.switches)
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
            switches=asked.switches,
            rerun=False,
        )
    ]
