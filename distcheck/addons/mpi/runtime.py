"""Starts and ends MPI in this process, or replaces it by a world of one rank.

MPI is started after the fork, and only once per process; it cannot be restarted after it was ended.
"""

import contextlib
import functools
import importlib
import os
import platform
import re
from pathlib import Path
from typing import Any

from distcheck.addons.mpi import library
from distcheck.errors import CannotRunError

_SHARED_FILE = re.compile(r"/dev/shm/mpich_shm_\w+")


@functools.cache
def mpi() -> Any:
    """Import and return mpi4py.MPI, with its automatic start and end disabled. Raises
    CannotRunError.
    """
    try:
        mpi4py = importlib.import_module("mpi4py")
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise CannotRunError(
            f"mpi4py cannot load an MPI library ({first}); pip install 'distcheck[mpi]', or name "
            "one in MPI4PY_LIBMPI"
        ) from None


def start() -> None:
    """Start MPI, unless the code under test has started it. Raises CannotRunError if the MPI
    library lacks thread support, which is necessary because DDP starts reductions in the thread
    that runs backward.
    """
    module = mpi()
    if not module.Is_initialized():
        module.Init_thread(module.THREAD_MULTIPLE)
    if module.Query_thread() < module.THREAD_SERIALIZED:
        raise CannotRunError(
            "this MPI library does not support threads; use a build with thread support"
        )


_world: Any = None


def world_communicator(rank: int, size: int) -> Any:
    """Create and return a communicator of all ranks, in the order of torch's ranks. This is a
    collective call. Raises CannotRunError if the MPI job has other ranks than torch.
    """
    global _world
    module = mpi()
    everybody = module.COMM_WORLD
    known = everybody.size
    if known != size:
        if known == 1:
            finalize()  # a world of one waits for no other; this removes its files
        raise CannotRunError(
            f"MPI knows of {known} ranks where {size} were started: its launcher and "
            "mpi4py's library belong to different MPI installations; put the launcher's folder "
            "first on PATH, or set MPI4PY_LIBMPI to its library"
        )
    if _world is None:
        _world = everybody.Split(0, rank)
        _world.Barrier()
        _unlink_shared_files()
    return _world


def created_world_communicator() -> Any:
    """Return the communicator that `world_communicator` created."""
    assert _world is not None, "torch makes the default group before any other"
    return _world


def finalize() -> None:
    module = mpi()
    if module.Is_initialized() and not module.Is_finalized():
        module.Finalize()


def _unlink_shared_files() -> None:
    """Unlink the files of MPICH in shared memory. MPICH itself unlinks them only when the last rank
    exits normally, so a killed rank would leave them behind. All ranks of the machine have mapped
    the memory by now.
    """
    with contextlib.suppress(OSError):
        for name in set(_SHARED_FILE.findall(Path("/proc/self/maps").read_text())):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def use_single_rank_world() -> None:
    """Import mpi4py without initializing MPI, and replace its world communicator by one of size 1
    that calls no library. Does nothing if mpi4py or its MPI library is not installed.

    Scripts ask for their rank at import (`rank = comm.Get_rank()`). An uninitialized MPI library
    ends the process on this call. In a process that only inspects code, the replacement answers
    instead. Anything else that needs MPI fails as before.
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
    """Return a communicator of size 1 that is an instance of mpi4py's class."""

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
