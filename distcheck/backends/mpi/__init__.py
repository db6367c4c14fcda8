"""MPI on CPU, by mpi4py: collectives, point-to-point and sub-groups on any MPI library.

torch has an MPI backend of its own only where it was built with one, and keeps the name "mpi" for
it; this one is known to torch as `distcheck_mpi`. In which order an MPI library adds is its own
affair (it depends on the library, its version, the size and the ranks' number), so there is no
`all_reduce_sum` here: what an all_reduce leaves is judged by bounds, and is not compared bit for
bit.

library.py   which launcher and which MPI library, without loading either
runtime.py   MPI in this process: start, end, communicators
buffers.py   from tensors to what MPI sends and reduces
calls.py     what was started, as torch's flight recorder would have it
work.py      a started operation, and waiting for it
group.py     the process group, and what it refuses
"""

import importlib.util

from distcheck.backends.mpi import library
from distcheck.backends.mpi.library import TORCH_NAME

INSTALL = "pip install 'distcheck[mpi]'"


def missing() -> str:
    """Why there can be no MPI here; empty where there can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"backend mpi needs mpi4py, which is not installed; {INSTALL}"
    if not library.under_launcher() and library.find_launcher() is None:
        return (
            "backend mpi needs mpirun or mpiexec, which is neither next to this Python nor on "
            f"PATH; {INSTALL}, or pip install mpich"
        )
    return ""


def register() -> str:
    """Makes torch know this backend; returns its name, or that of torch's own where it has one."""
    import torch.distributed as dist

    if dist.is_mpi_available():
        return "mpi"
    if not hasattr(dist.Backend, TORCH_NAME.upper()):
        from distcheck.backends.mpi import group, runtime

        runtime.start()
        dist.Backend.register_backend(TORCH_NAME, group.create, extended_api=True, devices=["cpu"])
    return TORCH_NAME


def finalize() -> None:
    """Ends MPI in this process, once all of its ranks call it; nothing may be on its way.

    A rank that ends without it is an aborted one to its launcher; where a launcher's process forks
    one rank after the other, the next cannot start before this one has been here.
    """
    from distcheck.backends.mpi import runtime

    runtime.finalize()
