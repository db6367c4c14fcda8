"""Runs a job's command again with parameters that are moved by one ULP in each step, in copies of
the project: the yardstick of its recording (`judge/parting/yardstick.py`).
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distcheck import private
from distcheck.errors import DistcheckError
from distcheck.job import condensing, running, settings
from distcheck.job.copying import Copy
from distcheck.job.settings import JobSettings
from distcheck.judge.parting.yardstick import DRAWS, Yardstick, measure
from distcheck.recordings.jobs.reading import JobRecording


def measured(
    job: JobRecording, asked: JobSettings, command: Sequence[str], copy: Copy, folder: Path, *,
    deadline_s: float,
) -> Yardstick:  # fmt: skip
    """How far the moved runs are from the job; `copy` is the project before it ran."""
    if copy.missing or not job.steps or job.divided_by:
        whole = job.divided_by and f"ranks hold parts of one model ({job.divided_by})"
        return Yardstick(why=copy.missing or whole or "no step was recorded")
    moved = []
    for draw in range(1, DRAWS + 1):
        own = folder / f"moved-{draw}"
        private.folder(own, is_new=True)
        file = settings.write(
            msgspec.structs.replace(asked, draw=draw, kept=False, ops=False, keep_going=False), own
        )
        project = dataclasses.replace(copy, folder=folder / f"copy-{draw}")
        try:
            shutil.copytree(copy.folder, project.folder, symlinks=True)
            ran = running.run_kept(
                project.words(command), file, folder=project.of(Path.cwd()) or project.folder,
                variables={}, without=(), deadline_s=deadline_s,
            )  # fmt: skip
            if ran.hung:
                raise DistcheckError(f"it made no progress for {deadline_s:g} s")
            running.check_recorded(own, ran, command)
            found = condensing.read(own, folder / f"whole-{draw}", asked.mesh)
            moved.append(dataclasses.replace(found, steps=found.steps[: len(job.steps)]))
        except (OSError, shutil.Error, DistcheckError) as error:
            return Yardstick(
                why=f"the command could not run again in a copy of the folder: {error}"
            )
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(project.folder)
    return measure(job, moved)
