"""MPI on CPU, through mpi4py: collectives, point-to-point and sub-groups on any MPI library.

torch has its own MPI backend only if it was built with one, and reserves the name "mpi" for it;
this one is registered as `distcheck_mpi`. The summation order of an MPI library is unspecified (it
depends on the library, its version, the size and the number of ranks), so there is no
`all_reduce_sum` here: an all_reduce is judged by error bounds, and is not compared bitwise.

library.py   finds the launcher and the MPI library, without loading either
runtime.py   MPI in this process: start, end, communicators; a stand-in outside any MPI job
buffers.py   converts tensors to the buffers that MPI sends and reduces
calls.py     started operations: their record, in the format of torch's flight recorder, and their
             Work
group.py     the process group, and the operations that it refuses

Ranks are part of an MPI job: a launcher starts a stand-in for each, and the helper forks the rank.

started.py   such a job, from its start to its end
stand_in.py  the program that the launcher starts in place of a rank
"""

import functools
import importlib.util
import threading

from distcheck.addons.mpi import library
from distcheck.addons.mpi.library import INSTALL, TORCH_NAME
from distcheck.worlds.shares import LauncherJob


def missing() -> str:
    """Return why MPI is unavailable here; empty if it is available."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"backend mpi needs mpi4py, which is not installed; {INSTALL}"
    if not library.is_under_mpi_launcher() and library.find_launcher() is None:
        return (
            "backend mpi needs mpirun or mpiexec, which is neither next to this Python nor on "
            f"PATH; {INSTALL}, or pip install mpich"
        )
    return ""


def register() -> str:
    """Register this backend with torch; return its name, or that of torch's own MPI."""
    import torch.distributed as dist

    if dist.is_mpi_available():
        return "mpi"
    if not hasattr(dist.Backend, TORCH_NAME.upper()):
        from distcheck.addons.mpi import group, runtime

        runtime.start()
        dist.Backend.register_backend(TORCH_NAME, group.create, extended_api=True, devices=["cpu"])
    return TORCH_NAME


def finalize() -> None:
    """End MPI in this process once all of its ranks call this; no communication may be in progress.

    To its launcher, a rank that ends without it has aborted; if a launcher's process forks one rank
    after another, the next cannot start before this call.
    """
    from distcheck.addons.mpi import runtime

    runtime.finalize()


def start_job(size: int) -> LauncherJob:
    """Start a job of an MPI launcher, which `size` ranks forked here will be part of."""
    from distcheck.addons.mpi.started import MPIJob

    return MPIJob(size)


def use_single_rank_world() -> None:
    """Make mpi4py usable in a process that no launcher has started."""
    from distcheck.addons.mpi import runtime

    runtime.use_single_rank_world()


def note_calls(registered: str) -> None:
    """Record this process's calls of this backend from now on, which torch does not."""
    if registered == TORCH_NAME:
        _note_calls()


@functools.cache
def _note_calls() -> None:
    """Groups whose calls time out sooner than usual have a limit of their own, which the code may
    rely on.
    """
    from distcheck.addons.mpi import calls
    from distcheck.addons.mpi.group import MPIGroup
    from distcheck.worlds import call_recorder, flight

    flight.record_further(flight.CallRecorder(calls.recorded_entries, calls.clear_record, _move_on))
    call_recorder.note_calls_of(MPIGroup)
    notes = call_recorder.HERE
    call_recorder.note_waits_of(
        calls.MPIWork, limited=lambda work: work.timeout_s < notes.usual_limit_s
    )


def _move_on() -> None:
    """Let MPI complete pending operations. It does not promise that two threads may enter it at
    once, so only the main thread does.
    """
    from distcheck.addons.mpi.calls import drive_mpi_progress
    from distcheck.addons.mpi.runtime import mpi

    in_main = threading.current_thread() is threading.main_thread()
    if in_main and mpi().Is_initialized() and not mpi().Is_finalized():
        drive_mpi_progress()
