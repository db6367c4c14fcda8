"""A recording as whole models: by the mesh that the script has, or that a person gives."""

from pathlib import Path

from distcheck.errors import UsageError
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.condensed import condensed
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import Axis
from distcheck.records.mesh import mesh_from_text


def read(recorded: Path, folder: Path, asked: str = "") -> JobRecording:
    """What ranks have recorded, put together in a new folder where they have parts of one model.
    Raises UsageError for axes that do not fit the ranks.
    """
    job = reading.read(recorded)
    axes: tuple[Axis, ...] = ()
    if asked:
        try:
            mesh = mesh_from_text(asked, job.world)
        except ValueError as error:
            raise UsageError(f"--mesh {asked}: {error}") from error
        axes = tuple(Axis(name=n, kind=n, size=size) for n, size in mesh.axes if size > 1)
    return condensed(job, folder, axes)
