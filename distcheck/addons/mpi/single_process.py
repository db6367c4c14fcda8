"""MPI in a process outside any MPI job: a communicator of one rank that calls no library.

Scripts query their rank at import (`rank = comm.Get_rank()`). An uninitialized MPI library ends the
process for that. In a process that only inspects code, the world communicator therefore answers as
a world of size 1. Anything else that needs MPI fails as before.
"""

import contextlib
import os
import platform
from typing import Any

from distcheck.addons.mpi import library


def stand_alone() -> None:
    """Import mpi4py uninitialized, if available, and replace its world by a communicator of one
    rank. Does nothing if mpi4py, or a library for it, is not installed.
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
    """Return a communicator of one rank, of mpi4py's class."""

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
