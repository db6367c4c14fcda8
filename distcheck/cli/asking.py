"""What `verify` and `plan` ask for: their options, and what a launcher has to say."""

from collections.abc import Callable
from typing import Any

from distcheck.plan.matrix import Planned, plan_run
from distcheck.worlds.launchers import OPTIONS, launch_of
from distcheck.worlds.launchers.launch import Launch


def plan_asked(
    asked: dict[str, Any], given: frozenset[str]
) -> tuple[Launch | None, Callable[[], Planned]]:
    """The launch, and how to come to the cases: a process that lends its ranks must be able to tell
    the front why it cannot. `asked` has a value for every option, `given` names the typed ones.
    """
    machines = {name: asked.pop(name) for name in OPTIONS}
    config, shard = asked.pop("config"), asked.pop("shard")
    typed = asked["worlds"]
    launch, asked["worlds"] = launch_of(machines, typed)
    asked["ranks_here"] = None if launch is None else launch.local_world
    if launch is not None or (not typed and asked["worlds"] == (1,)):
        given |= {"worlds"}  # a launcher has made its world already
    return launch, lambda: plan_run(asked, given=given, launch=launch, config=config, shard=shard)
