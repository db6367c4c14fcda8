"""The options of `verify` and `plan` as a request, including those that a launcher sets."""

from collections.abc import Callable
from typing import Any

from distcheck.errors import UsageError
from distcheck.plan.matrix import Planned, plan_run
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


def check_alone(given: frozenset[str], *, launched: bool) -> None:
    """Raise UsageError for an option that excludes another one, or a launcher."""
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
    """Return the launch, and a function that plans the cases, or a part of them, as "2/4": planning
    is separate so that a process that lends its ranks can report to rank 0 why it cannot.

    `asked` has a value for every option, `given` names those on the command line.
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
