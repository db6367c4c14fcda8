"""Settings that are declared once: a field here is an option of `verify` and `plan`, a key of the
configuration, a parameter of `distcheck.verify(...)`, and a field of a request.

A new one is a field here, and the place that reads it. Options that take names, or several values,
are declared where their names are known (`cli/`, `configuration.py`, `testing/verifying.py`);
tests/unit/test_settings.py holds all of them equal. No torch, and no click.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

F = TypeVar("F", bound=Callable[..., Any])


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How a field is asked for.

    kind      what its key takes, and `takes` the same in words
    help      of its option; `metavar` stands for the value there
    default   in words, where that says more than the value
    """

    kind: Any
    takes: str
    help: str
    metavar: str | None = None
    default: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set, with what it is if it is not."""

    thorough: Annotated[
        bool,
        Setting(
            kind=bool,
            takes="true or false",
            help="Also run the cells (tied weights, frozen layers, odd sizes, resume, ...) in "
            "worlds 2 to 6, or those of --world, and search for a minute. The cost is printed "
            "first.",
        ),
    ] = False
    explore_s: Annotated[
        float,
        Setting(
            kind=Annotated[float, Meta(ge=0)],
            takes="seconds to search with --thorough, from 0 (no search)",
            help="With --thorough: the seconds to search for a failure of each strategy; 0: none.",
            metavar="S",
        ),
    ] = 60.0
    steps: Annotated[
        int | None,
        Setting(
            kind=Annotated[int, Meta(ge=1)],
            takes="a number of steps, at least 1",
            help="Steps to record; fewer than 3 miss bugs that begin late.",
            metavar="N",
            default="each workload's own number",
        ),
    ] = None
    separate: Annotated[
        bool,
        Setting(
            kind=bool,
            takes="true or false",
            help="Rerun in separate interpreters, as on several machines. Without them a run is "
            "about 2 s faster.",
        ),
    ] = True
    after_hang: Annotated[
        bool,
        Setting(
            kind=bool,
            takes="true or false",
            help="Also run the other cases of a strategy that has hung. By default they are "
            "unknown, and the verdict stays fail.",
        ),
    ] = False
    schedules: Annotated[
        int,
        Setting(
            kind=Annotated[int, Meta(ge=0)],
            takes="a number of schedules, from 0 (none)",
            help="With --backend simulated: also run this many schedules, in which ranks take "
            "turns in another order, and compare what they come to.",
            metavar="N",
        ),
    ] = 0
    switches: Annotated[
        int,
        Setting(
            kind=Annotated[int, Meta(ge=0)],
            takes="a number of switches, from 0 (schedules are drawn)",
            help="With --backend simulated: run every schedule with at most this many switches, "
            "those with the fewest first; --schedules is the most that are run (1000).",
            metavar="K",
        ),
    ] = 0
    schedule: Annotated[
        str | None,
        Setting(
            kind=str,
            takes="a schedule, as a report prints it",
            help="With --backend simulated: run under this schedule, as a report prints it.",
            metavar="SCHEDULE",
            default="the usual one",
        ),
    ] = None


def _declared() -> dict[str, Setting]:
    hints = get_type_hints(Settings, include_extras=True)
    return {name: next(filter(_is_setting, hint.__metadata__)) for name, hint in hints.items()}


def _is_setting(found: object) -> bool:
    return isinstance(found, Setting)


SETTINGS: Mapping[str, Setting] = _declared()
DEFAULTS: Mapping[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(Settings)
}


def with_settings(function: F) -> F:
    """Shows the settings that a function takes by `**more` among its parameters."""
    own = inspect.signature(function).parameters
    shown = [one for one in own.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    shown += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name])
        for name in SETTINGS
        if name not in own
    ]
    function.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return function
