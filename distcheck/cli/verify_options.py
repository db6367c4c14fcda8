"""What `verify` and `plan` ask for: their options, and what a launcher has to say."""

from collections.abc import Callable
from typing import Any

from distcheck.errors import UsageError
from distcheck.plan.matrix import Planned, plan_run
from distcheck.worlds.launchers import OPTIONS, Launch, launch_of

# Options of which each is another way to run cases: what does not go with it, and why not.
_ALONE = {
    "watch": (
        ("on", "save", "shard", "last_failed", "failed_first"),
        "runs here again and again, and what failed in the run before goes first anyway",
    ),
    "on": (
        ("save", "shard", "last_failed", "failed_first"),
        "cuts the whole matrix into tasks, each of which runs on one machine",
    ),
}


def check_alone(given: frozenset[str], *, launched: bool) -> None:
    """Raises UsageError for an option that does not go with another one, or with a launcher."""
    for name, (others, why) in _ALONE.items():
        if name not in given:
            continue
        beside = [f"--{other.replace('_', '-')}" for other in others if other in given]
        beside += ["a launcher"] if launched else []
        if beside:
            raise UsageError(
                f"--{name} does not go with {beside[0]}: it {why}; leave one of them out"
            )


def plan_from_options(
    asked: dict[str, Any], given: frozenset[str]
) -> tuple[Launch | None, Callable[..., Planned]]:
    """The launch, and how to come to the cases, or to a part of them, as in "2/4": a process that
    lends its ranks must be able to tell the front why it cannot. `asked` has a value for every
    option, `given` names the typed ones.
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
