"""`distcheck verify --on ENGINE`: the parts of a matrix as tasks of an engine that a team has.

An engine places, queues and retries; distcheck cuts the matrix as `--shard` does, and joins what
comes back as `merge` does. A task that is lost is unknown, with the engine's reason.

part         what a task does: one part, judged by a distcheck of its own
running      the front: tasks are started, reports are joined
on_ray, on_slurm    one file an engine, with `start(address, work) -> Tasks`
"""

from typing import Any


def run_on(address: str, plan: Any, **shown: Any) -> int:
    """Run the parts of a plan on an engine; see `running.run_on`. Return the exit code."""
    from distcheck.engines import running

    return running.run_on(address, plan, **shown)
