"""Communication backend for MPI on the CPU, through mpi4py: collectives, point-to-point messages
and subgroups, with any MPI library.

torch has its own MPI backend only if it was built with one, and reserves the name "mpi" for it;
this backend is registered as `distcheck_mpi`. The reduction order of an MPI library is unspecified:
it depends on the library, its version, the message size and the number of ranks. This backend
therefore defines no `all_reduce_sum`, and results are judged by error bounds instead of bitwise.

    library.py   finds the launcher and the MPI library, without loading either
    runtime.py   MPI in this process: start, end, communicators; a replacement outside an MPI job
    buffers.py   converts tensors to the buffers that MPI sends and reduces
    calls.py     started operations: their `Work`, and their record in the format of torch's flight
                 recorder
    group.py     the process group, and the operations that it refuses

Ranks are part of an MPI job: a launcher starts a stand-in process for each rank, and the helper
forks the rank itself.

    started.py   a started MPI job
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
    """Register this backend with torch. Return its name, or "mpi" if torch was built with MPI."""
    import torch.distributed as dist

    if dist.is_mpi_available():
        return "mpi"
    if not hasattr(dist.Backend, TORCH_NAME.upper()):
        from distcheck.addons.mpi import group, runtime

        runtime.start()
        dist.Backend.register_backend(TORCH_NAME, group.create, extended_api=True, devices=["cpu"])
    return TORCH_NAME


def finalize() -> None:
    """End MPI in this process. All ranks must call this function, and no communication may be in
    progress.

    The launcher treats a rank that exits without this call as aborted. If one process of the
    launcher forks several ranks in turn, the next rank cannot start before this call.
    """
    from distcheck.addons.mpi import runtime

    runtime.finalize()


def start_job(size: int) -> LauncherJob:
    """Start an MPI job with a launcher. `size` ranks that are forked here become part of it."""
    from distcheck.addons.mpi.started import MPIJob

    return MPIJob(size)


def use_single_rank_world() -> None:
    """Make mpi4py usable in a process that no launcher has started; see
    `runtime.use_single_rank_world`.
    """
    from distcheck.addons.mpi import runtime

    runtime.use_single_rank_world()


def note_calls(registered: str) -> None:
    """Record the calls of this backend in this process from now on, because torch does not record
    them.
    """
    if registered == TORCH_NAME:
        _note_calls()


@functools.cache
def _note_calls() -> None:
    """Record the calls of `MPIGroup`. A group whose timeout is shorter than usual is treated as
    having a timeout that the code may rely on.
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
    """Let MPI complete pending operations. Only the main thread does this, because MPI may not
    support calls from two threads at once.
    """
    from distcheck.addons.mpi.calls import drive_mpi_progress
    from distcheck.addons.mpi.runtime import mpi

    in_main = threading.current_thread() is threading.main_thread()
    if in_main and mpi().Is_initialized() and not mpi().Is_finalized():
        drive_mpi_progress()
