"""Reads recordings as complete models, and reruns a job's command in a copy of the project."""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from distcheck import private
from distcheck.errors import DistcheckError, UsageError
from distcheck.job import running, settings
from distcheck.job.copying import ProjectCopy
from distcheck.job.inside.moved_gradients import with_moved_gradients
from distcheck.job.settings import JobSettings
from distcheck.judge.divergence.noise_floor import PERTURBED_RUNS, NoiseFloor, measure_noise_floor
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import MeshAxis
from distcheck.recordings.jobs.unsharded import unshard_recording
from distcheck.records.mesh import parse_mesh


def read_whole(recorded: Path, folder: Path, asked: str = "") -> JobRecording:
    """Read a recording. If ranks share a model, unshard it into a new folder. Raises UsageError for
    axes that do not fit the ranks.
    """
    job = reading.read_recording(recorded)
    axes: tuple[MeshAxis, ...] = ()
    if asked:
        try:
            mesh = parse_mesh(asked, job.world)
        except ValueError as error:
            raise UsageError(f"--mesh {asked}: {error}") from error
        axes = tuple(MeshAxis(name=n, kind=n, size=size) for n, size in mesh.axes if size > 1)
    return with_moved_gradients(unshard_recording(job, folder, axes))


def record_again(
    asked: JobSettings,
    command: Sequence[str],
    copy: ProjectCopy,
    folder: Path,
    *,
    deadline_s: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Rerun the command in a copy of the project. Return the folder of the new recording, which is
    within `folder`. `variables` are added to the command's environment. Raises DistcheckError,
    OSError or shutil.Error if the command cannot run.
    """
    recorded, project = folder / "recording", dataclasses.replace(copy, folder=folder / "copy")
    private.folder(recorded, is_new=True)
    once_more = msgspec.structs.replace(asked, keep_going=False)
    try:
        shutil.copytree(copy.folder, project.folder, symlinks=True)
        ran = running.run_silently(
            project.words(command), settings.write(once_more, recorded),
            folder=project.of(Path.cwd()) or project.folder, variables=variables, without=(),
            deadline_s=deadline_s,
        )  # fmt: skip
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(project.folder)
    if ran.hung:
        raise DistcheckError(f"the command made no progress for {deadline_s:g} s")
    running.check_recorded(recorded, ran, command)
    return recorded


def measured(
    job: JobRecording, asked: JobSettings, command: Sequence[str], copy: ProjectCopy, folder: Path,
    *, deadline_s: float,
) -> NoiseFloor:  # fmt: skip
    """Measure the noise floor (`judge/divergence/noise_floor.py`) of a job by rerunning it with
    parameters perturbed by one ULP. `copy` is the project before the job ran.
    """
    if copy.missing or not job.steps or job.divided_by:
        whole = job.divided_by and f"ranks hold shards of one model ({job.divided_by})"
        return NoiseFloor(why=copy.missing or whole or "no step was recorded")
    perturbed = []
    for draw in range(1, PERTURBED_RUNS + 1):
        own = folder / str(draw)
        moves = msgspec.structs.replace(asked, draw=draw, kept=False, ops=False)
        try:
            recorded = record_again(moves, command, copy, own, deadline_s=deadline_s)
            found = read_whole(recorded, own / "whole", asked.mesh)
        except (OSError, shutil.Error, DistcheckError) as error:
            return NoiseFloor(
                why=f"the command could not run again in a copy of the folder: {error}"
            )
        perturbed.append(dataclasses.replace(found, steps=found.steps[: len(job.steps)]))
    return measure_noise_floor(job, perturbed)
