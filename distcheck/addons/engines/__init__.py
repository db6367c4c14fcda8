"""`distcheck verify --on ENGINE`: runs the parts of a matrix as tasks of an existing engine.

The engine places, queues and retries tasks; distcheck splits the matrix like `--shard`, and merges
the results like `merge`. A lost task makes its part unknown, with the engine's reason.

running      the task, which judges one part in a separate distcheck process; and the front end,
             which starts tasks and merges reports
on_ray, on_slurm    one file per engine, with `start(address, work) -> Tasks`
"""

from typing import Any


def run_on(address: str, plan: Any, **shown: Any) -> int:
    """Run the parts of a plan on an engine; see `running.run_on`. Return the exit code."""
    from distcheck.addons.engines import running

    return running.run_on(address, plan, **shown)
