"""MPI on CPU, through mpi4py: collectives, point-to-point and sub-groups on any MPI library.

torch has its own MPI backend only if it was built with one, and reserves the name "mpi" for it;
this one is registered as `distcheck_mpi`. The summation order of an MPI library is unspecified (it
depends on the library, its version, the size and the number of ranks), so there is no
`all_reduce_sum` here: an all_reduce is judged by error bounds, and is not compared bitwise.

library.py   finds the launcher and the MPI library, without loading either
runtime.py   MPI in this process: start, end, communicators
buffers.py   converts tensors to the buffers that MPI sends and reduces
calls.py     started operations, in the format of torch's flight recorder
work.py      a started operation, and the wait for it
group.py     the process group, and the operations that it refuses
"""

import importlib.util

from distcheck.backends.mpi import library
from distcheck.backends.mpi.library import TORCH_NAME

INSTALL = "pip install 'distcheck[mpi]'"


def missing() -> str:
    """Return why MPI is unavailable here; empty if it is available."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"backend mpi needs mpi4py, which is not installed; {INSTALL}"
    if not library.under_launcher() and library.find_launcher() is None:
        return (
            "backend mpi needs mpirun or mpiexec, which is neither beside this Python nor on "
            f"PATH; {INSTALL}, or pip install mpich"
        )
    return ""


def register() -> str:
    """Register this backend with torch; return its name, or that of torch's own MPI."""
    import torch.distributed as dist

    if dist.is_mpi_available():
        return "mpi"
    if not hasattr(dist.Backend, TORCH_NAME.upper()):
        from distcheck.backends.mpi import group, runtime

        runtime.start()
        dist.Backend.register_backend(TORCH_NAME, group.create, extended_api=True, devices=["cpu"])
    return TORCH_NAME


def finalize() -> None:
    """End MPI in this process once all of its ranks call this; no communication may be in progress.

    To its launcher, a rank that ends without it has aborted; if a launcher's process forks one rank
    after another, the next cannot start before this call.
    """
    from distcheck.backends.mpi import runtime

    runtime.finalize()
