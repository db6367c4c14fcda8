"""Converts the options of `verify` and `plan`, and the settings of a launcher, to a request and its
cases.
"""

from collections.abc import Callable, Sequence
from typing import Any

from distcheck.errors import UsageError
from distcheck.errors.shown_text import print_displayable
from distcheck.plan.matrix import Planned, plan_run
from distcheck.records import Case
from distcheck.store import earlier_runs
from distcheck.store.run_folder import DEFAULT_FOLDER
from distcheck.worlds.launchers import OPTIONS, Launch, launch_of

# Options that each run cases in another way: the options that exclude them, and the reason.
_ALONE = {
    "watch": (
        ("on", "save", "shard", "last_failed", "failed_first"),
        "reruns here on every change, and runs previously failed cases first anyway",
    ),
    "on": (
        ("save", "shard", "last_failed", "failed_first"),
        "splits the whole matrix into tasks that each run on one machine",
    ),
}


def check_exclusive_options(given: frozenset[str], *, launched: bool) -> None:
    """Raise UsageError for options that exclude each other, or that cannot be used with
    a launcher.
    """
    for name, (others, why) in _ALONE.items():
        if name not in given:
            continue
        beside = [f"--{other.replace('_', '-')}" for other in others if other in given]
        beside += ["a launcher"] if launched else []
        if beside:
            raise UsageError(
                f"--{name} cannot be combined with {beside[0]}: it {why}; remove one of them"
            )


def plan_from_options(
    asked: dict[str, Any], given: frozenset[str]
) -> tuple[Launch | None, Callable[..., Planned]]:
    """Return the launch, and a function that plans the cases, or a shard of them such as "2/4".

    Planning is a separate call so that a process that lends its ranks can tell rank 0 why it cannot
    take part. `asked` has a value for every option; `given` names the options on the command line.
    """
    machines = {name: asked.pop(name) for name in OPTIONS}
    config, shard = asked.pop("config"), asked.pop("shard")
    typed = asked["worlds"]
    launch, asked["worlds"] = launch_of(machines, typed)
    asked["ranks_here"] = None if launch is None else launch.local_world
    if launch is not None or (not typed and asked["worlds"] == (1,)):
        given |= {"worlds"}  # a launcher has made its world already

    def plan(part: str | None = None) -> Planned:
        return plan_run(asked, given=given, launch=launch, config=config, shard=part or shard)

    return launch, plan


def order_by_last_run(cases: Sequence[Case], *, only: bool) -> tuple[list[Case], dict[str, str]]:
    """Return the cases; those that failed in their last run come first. With `only`, return just
    these, and the reason for each case left out. If none failed, return all cases.
    """
    failed = earlier_runs.ids_of_failed_cases(DEFAULT_FOLDER / "runs", cases)
    if not failed:
        which = (
            f"none of these {len(cases)} cases failed" if cases[1:] else "this case did not fail"
        )
        so = "all of them are run" if cases[1:] else "it is run"
        print_displayable(
            f"distcheck: {which} in the last run here ({DEFAULT_FOLDER / 'runs'}); {so}", err=True
        )
        return list(cases), {}
    first = earlier_runs.with_failed_first(cases, failed)
    which = "are run" if only else "are run first"
    print_displayable(
        f"distcheck: {len(failed)} of {len(cases)} cases failed in their last run here; they "
        f"{which}",
        err=True,
    )
    out = earlier_runs.reasons_to_skip_passed(cases, failed) if only else {}
    return [case for case in first if case.id not in out], out
