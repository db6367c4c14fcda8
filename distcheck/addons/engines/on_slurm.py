"""Slurm engine, through submitit: each part of a matrix runs as a job with one CPU or GPU per rank.
Code is loaded by its path, so the current folder must be on a file system that all nodes share.
"""

import contextlib
import io
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from distcheck import private
from distcheck.addons.engines.running import Ended, LostPart, MatrixTask, run_part
from distcheck.errors import CannotRunError
from distcheck.errors.shown_text import one_line
from distcheck.store.run_folder import private_folder

_LOOK_EVERY_S = 1.0
_MOST_MINUTES = 24 * 60  # of a part, unless SBATCH_TIMELIMIT is set
HERE = "local"  # the address for processes of this machine, without Slurm


class SlurmEngine:
    """Jobs of a Slurm cluster."""

    code = "it is loaded by its path: nodes must have access to this folder"

    def __init__(self, place: Path) -> None:
        self._place, self._folder = place, os.getcwd()
        self._jobs: list[tuple[Any, MatrixTask]] = []

    def submit(self, executor: Any, work: Sequence[MatrixTask], umask: int) -> None:
        """Submit one array of jobs for each number of ranks."""
        ordered = sorted(work, key=lambda part: (part.ranks, part.gpus))
        for (ranks, gpus), parts in groupby(ordered, key=lambda part: (part.ranks, part.gpus)):
            executor.update_parameters(
                name="distcheck", nodes=1, tasks_per_node=1, cpus_per_task=ranks,
                gpus_per_node=gpus, timeout_min=_MOST_MINUTES,
            )  # fmt: skip
            with executor.batch():
                started = [
                    (executor.submit(run_part, list(part.words), self._folder, umask), part)
                    for part in parts
                ]
            self._jobs += started

    def ended(self) -> Iterator[tuple[MatrixTask, Ended | LostPart]]:
        """Wait one second, then yield the jobs that have ended."""
        time.sleep(_LOOK_EVERY_S)
        for job, part in list(self._jobs):
            if not job.done():
                continue
            self._jobs.remove((job, part))
            error = job.exception()
            if error is None:
                yield part, job.result()
            else:
                state = getattr(job, "state", "")
                first = next((line for line in str(error).splitlines() if line.strip()), "")
                yield part, LostPart(f"Slurm's job {job.job_id} ended as {state}: {first.strip()}")

    def close(self) -> None:
        """Cancel the jobs that still run, and remove the files with the arguments and results of
        all jobs.
        """
        for job, _ in self._jobs:
            job.cancel()
        for pickle in self._place.glob("*.pkl"):
            pickle.unlink(missing_ok=True)


def start(address: str, work: Sequence[MatrixTask]) -> SlurmEngine:
    """Submit jobs by sbatch; SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT set partition,
    account and time limit. Raises CannotRunError.
    """
    import submitit

    logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns if there is no accounting
    if address not in ("", HERE):
        raise CannotRunError(
            f"--on slurm://{address}: Slurm takes no address, because distcheck uses the local "
            "sbatch; pass --on slurm, and set SBATCH_PARTITION for a partition"
        )
    if not address and shutil.which("sbatch") is None:
        raise CannotRunError(
            "--on slurm needs sbatch, which is not on PATH; run it on a machine that submits jobs"
        )
    # Jobs and results are pickles: the folder is new, and belongs to this user only.
    place = private_folder("slurm").absolute() / private.unique("jobs-")
    try:
        private.folder(place, is_new=True, strictly=True)
        private.check_stays(place)
    except OSError as error:
        raise CannotRunError(
            f"--on slurm exchanges pickles in {error.filename}: {error.strerror}; work in a "
            "writable folder"
        ) from error
    engine = SlurmEngine(place)
    # -P, and a folder of its own for submitit's process on this machine: modules in the current
    # folder must not shadow others.
    python = f"{shlex.quote(sys.executable)} -P"
    umask = os.umask(0o077)  # submitit's files contain the arguments, and Slurm's jobs inherit it
    try:
        # The errors of sbatch are in the exception.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.chdir(place if address else "."):
            executor = submitit.AutoExecutor(
                place, cluster=address or "slurm", slurm_python=python, local_python=python
            )
            engine.submit(executor, work, umask)
    except (RuntimeError, ValueError, OSError) as error:
        engine.close()
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise CannotRunError(
            f"--on slurm: sbatch did not start the jobs ({one_line(first)}); set SBATCH_PARTITION, "
            "SBATCH_ACCOUNT and SBATCH_TIMELIMIT as your cluster requires"
        ) from None
    finally:
        os.umask(umask)
    return engine
