"""`distcheck verify --on ENGINE`: runs the parts of a matrix as tasks of an existing engine.

The engine places, queues and retries tasks; distcheck splits the matrix like `--shard`, and merges
the results like `merge`. A lost task is unknown, with the engine's reason.

part         the task: one part, judged by its own distcheck process
running      the front end: starts tasks, merges reports
on_ray, on_slurm    one file per engine, with `start(address, work) -> Tasks`
"""
