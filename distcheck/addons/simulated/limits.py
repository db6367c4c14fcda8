"""Refuses operations that a simulated world does not support, and replaces some others.

A rank that forks, or communicates through another library, cannot be simulated, so the run ends
with a one-line error. A command (subprocess, os.system) runs while its rank stays scheduled.
`time.sleep` takes no time, but lets other ranks run: see `scheduler.py`. `os._exit` ends the rank,
because it would end the rank's process.
"""

import copy
import functools
import importlib
import multiprocessing.process
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distcheck.addons.simulated.calls import is_repr_by_library
from distcheck.addons.simulated.group import TORCH_NAME
from distcheck.addons.simulated.isolation import is_rank_code
from distcheck.addons.simulated.work import finish_before_torch_waits
from distcheck.addons.simulated.world import current_world
from distcheck.machine import compat
from distcheck.worlds.callers import is_tested_code

_FORKS = ("os.fork", "os.forkpty", "os.exec")
_OWN_TRANSPORT = ("mpi4py", "horovod", "ray", "torch_ucc")
USES_CUDA = "it uses CUDA"
_MEETS = (
    "it calls init_process_group itself, so its ranks would connect outside the simulated world,"
)
_LIBRARY = tuple(
    os.path.join(os.path.dirname(torch.__file__), name) for name in ("library.py", "_library")
)
_MARK = "_distcheck_uses_cuda"
_COPY = copy.copy.__code__  # shares the memory without reading it


class RankLeftError(BaseException):
    """Raised when a rank calls os._exit."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@cache
def install_limits() -> None:
    """Install the limits in this process, for all worlds that it runs. They cannot be removed."""
    sleep, set_signal, leave = time.sleep, signal.signal, os._exit

    def sleep_or_give_way(seconds: float, /) -> None:
        if current_world().scheduler.rank is None:
            sleep(seconds)
        else:
            current_world().scheduler.sleep(seconds)

    def refuse_signal(number: Any, handler: Any, /) -> Any:
        if current_world().scheduler.rank is not None:
            current_world().refuse("it sets a signal handler")
        return set_signal(number, handler)

    def leave_rank(status: int) -> NoReturn:
        if current_world().scheduler.rank is not None:
            raise RankLeftError(status)
        leave(status)

    def refuse_start(self: Any) -> None:
        current_world().refuse("it starts a process")

    def refuse_rpc(*_: Any, **__: Any) -> NoReturn:
        current_world().refuse("it starts RPC, which uses its own threads and sockets")

    module: Any = time
    module.sleep = sleep_or_give_way
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    rpc.init_rpc = refuse_rpc
    module = signal
    module.signal = refuse_signal
    os._exit = leave_rank
    multiprocessing.process.BaseProcess.start = refuse_start  # type: ignore[method-assign]
    finish_before_torch_waits()
    _watch_reads()
    _join_groups_of_gloo()
    _refuse_operators()
    _refuse_cuda()
    sys.addaudithook(_audit_event)


def _join_groups_of_gloo() -> None:
    """Replace gloo groups that the code requests by simulated groups; torch still reports gloo as
    their backend. Refuse a new default group, because its ranks would rendezvous at another store.
    """
    c10d: Any = dist.distributed_c10d
    meet = c10d.rendezvous

    def with_make(make: Any) -> Any:
        def make_group(
            size: int, rank: Any, ranks: list[int], backend: str, *given: Any, **named: Any
        ) -> Any:
            of_code = current_world().scheduler.rank is not None and backend != TORCH_NAME
            if of_code and not ranks:
                current_world().refuse(_MEETS)
            if of_code and "gloo" in str(backend):
                backend = TORCH_NAME
            group, store = make(size, rank, ranks, backend, *given, **named)
            groups = compat.groups()
            if group in groups and backend == TORCH_NAME:
                groups[group] = (dist.Backend("gloo"), store)
            return group, store

        return make_group

    def refuse_to_meet(*given: Any, **named: Any) -> Any:
        if current_world().scheduler.rank is not None:
            current_world().refuse(_MEETS)
        return meet(*given, **named)

    def barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            own: Any = group or dist.group.WORLD
            own.monitored_barrier(timeout, wait_all_ranks)

    compat.MAKE_GROUP.replace(with_make)
    c10d.rendezvous = refuse_to_meet
    c10d.monitored_barrier = barrier
    dist.monitored_barrier = barrier


def _refuse_operators() -> None:
    """Refuse custom operators that the code under test defines. A process has one registry of
    operators, so all ranks would use the code of one rank.
    """
    library: Any = torch.library.Library
    begin = library.__init__

    def begin_library(self: Any, *given: Any, **named: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
            frame = frame.f_back
        of_ranks = frame is not None and is_rank_code(frame.f_code.co_filename)
        if of_ranks and current_world().scheduler.rank is not None:
            current_world().refuse(
                "it defines operators by torch.library, which all ranks would share,"
            )
        begin(self, *given, **named)

    library.__init__ = begin_library


def _refuse_cuda() -> None:
    def with_init(init: Callable[[], None]) -> Callable[[], None]:
        def init_cuda() -> None:
            if current_world().scheduler.rank is None:
                init()
                return
            if torch.cuda.is_available():
                current_world().refuse(USES_CUDA)
            try:
                init()
            except Exception as error:
                setattr(error, _MARK, True)  # code may catch it and continue without CUDA
                raise

        return init_cuda

    compat.START_CUDA.replace(with_init)


def _watch_reads() -> None:
    """Hook tensor methods that read memory without a dispatched operation. Like operations, they
    must not read memory that a call still writes.
    """
    shown = lambda: not is_repr_by_library()  # noqa: E731
    kept = lambda: sys._getframe(2).f_code is not _COPY  # noqa: E731
    _watch("tolist", "tolist", lambda: True)
    _watch("__repr__", "repr", shown)
    _watch("__reduce_ex__", "pickle", kept)


def _watch(name: str, shown_as: str, counts: Callable[[], bool]) -> None:
    reads: Any = getattr(torch.Tensor, name)

    @functools.wraps(reads)
    def watched(self: torch.Tensor, *given: Any, **named: Any) -> Any:
        rank = current_world().scheduler.rank
        if rank is not None and counts():
            current_world().read(rank, self, shown_as)
        return reads(self, *given, **named)

    setattr(torch.Tensor, name, watched)


def _audit_event(event: str, given: tuple[Any, ...]) -> None:
    if current_world().scheduler.rank is None:
        return
    if event in _FORKS:
        current_world().refuse(f"it calls {event}")
    if event == "import" and given[0] in _OWN_TRANSPORT:
        current_world().refuse(f"it imports {given[0]}, which communicates by itself")


def line_of_cuda_request(error: BaseException | None) -> str:
    """Return the line whose request for CUDA failed with `error`, as " at FILE:LINE"; empty for any
    other error.
    """
    while error is not None:
        if getattr(error, _MARK, False):
            frames = traceback.extract_tb(error.__traceback__)
            theirs = [frame for frame in frames if is_tested_code(frame.filename)]
            return f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else " "
        error = error.__cause__ or error.__context__
    return ""
