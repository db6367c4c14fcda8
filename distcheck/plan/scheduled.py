"""Schedules of a simulated world, as they are asked for, and the case that is searched for them."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from distcheck import backends
from distcheck.errors import UsageError
from distcheck.records import Case
from distcheck.records.schedules import read_schedule

_WORKLOAD = "mlp:small"  # where none was given: a schedule costs least there
_STEPS = 2  # the second begins with what the first has left in flight
_MOST = 10**6


class Asked(Protocol):
    """What a request says of it."""

    @property
    def schedules(self) -> int:
        """How many are searched."""

    @property
    def workloads(self) -> tuple[str, ...]:
        """The workloads that were asked for."""

    @property
    def dtype(self) -> str | None:
        """The dtype that was asked for."""

    @property
    def steps(self) -> int | None:
        """The steps that were asked for."""


def check_schedules(schedules: int, schedule: str | None, backend: str) -> None:
    """Raises UsageError for what cannot be run."""
    if not 0 <= schedules <= _MOST:
        raise UsageError(f"--schedules {schedules} is out of range; it takes 0 to {_MOST}")
    if schedule is not None:
        read_schedule(schedule)
    asked = "--schedules" if schedules else "--schedule" if schedule else ""
    if asked and backends.name_of(backend) != "simulated":
        raise UsageError(
            f"{asked} needs ranks whose turns distcheck decides; add --backend simulated"
        )


def searched(asked: Asked, case_of: Callable[[str, str], Case]) -> list[Case]:
    """The case that is searched, if one was asked for; `case_of` makes it of a workload and dtype.
    It has no rerun: the schedules take its place. It is the first of its strategy and world, so
    that one that hangs is named by what its schedules show.
    """
    if not asked.schedules:
        return []
    case = case_of((*asked.workloads, _WORKLOAD)[0], asked.dtype or "float32")
    steps = _STEPS if asked.steps is None else asked.steps
    return [
        msgspec.structs.replace(
            case,
            id=f"{case.id}-schedules",
            steps=steps,
            schedules=asked.schedules,
            rerun=False,
        )
    ]
