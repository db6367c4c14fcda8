"""MPI in a process that does not belong to an MPI job: a communicator of one, that asks no library.

Scripts ask for their rank where they are loaded (`rank = comm.Get_rank()`). Before MPI is
initialized a library ends the process for that. So where code is only looked at, the world's
communicator answers for a world of one. Anything else that needs MPI fails there as it did.
"""

import contextlib
import os
import platform
from typing import Any

from distcheck.backends.mpi import library


def stand_alone() -> None:
    """Finds mpi4py, leaves it uninitialized, and makes this process its world.

    Does nothing where mpi4py, or a library for it, is not installed.
    """
    with contextlib.suppress(ImportError, RuntimeError):
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        launcher = library.find_launcher()
        if launcher is not None and launcher.library:
            os.environ.setdefault("MPI4PY_LIBMPI", launcher.library)
        from mpi4py import MPI

        if not MPI.Is_initialized():
            module: Any = MPI
            module.COMM_WORLD = _communicator(MPI)
            module.Get_processor_name = platform.node


def _communicator(mpi: Any) -> Any:
    """A communicator of one, as mpi4py's classes have it."""

    def itself(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def first(_: Any, value: Any = None, *__: Any, **___: Any) -> Any:
        return value

    methods: dict[str, Any] = {
        "__module__": mpi.__name__,
        "rank": property(lambda self: 0),
        "size": property(lambda self: 1),
        "Get_rank": lambda self: 0,
        "Get_size": lambda self: 1,
        "Get_name": lambda self: "MPI_COMM_WORLD",
        "Barrier": lambda self: None,
        "barrier": lambda self: None,
        "gather": lambda self, value=None, root=0: [value],
        "allgather": lambda self, value=None: [value],
        "scatter": lambda self, values=None, root=0: values[0],
    }
    methods |= dict.fromkeys(("Dup", "Split", "Clone", "Split_type"), itself)
    methods |= dict.fromkeys(("bcast", "reduce", "allreduce"), first)
    return type("Alone", (mpi.Intracomm,), methods)()
