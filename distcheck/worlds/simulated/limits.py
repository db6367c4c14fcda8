"""What code under test may not do in a simulated world, and what works otherwise there.

A rank that forks, or talks by a library of its own, would leave the world: the run ends with one
sentence. A command (subprocess, os.system) is run while the rank keeps its turn. `time.sleep` takes
no time, but lets other ranks run: see `baton.py`. `os._exit` ends the rank, as it ends a process.
"""

import importlib
import multiprocessing.process
import os
import signal
import sys
import time
import traceback
from functools import cache
from typing import Any, NoReturn

import torch

from distcheck.backends.simulated.calls import is_theirs
from distcheck.backends.simulated.world import here

_FORKS = ("os.fork", "os.forkpty", "os.exec")
_OWN_TRANSPORT = ("mpi4py", "horovod", "ray", "torch_ucc")
USES_CUDA = "it uses CUDA"
_MARK = "_distcheck_uses_cuda"


class RankLeftError(BaseException):
    """A rank has called os._exit."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@cache
def install() -> None:
    """Puts them in place in this process, for good, and for every world that it runs."""
    sleep, set_signal, leave = time.sleep, signal.signal, os._exit

    def sleep_or_give_way(seconds: float, /) -> None:
        if here().baton.rank is None:
            sleep(seconds)
        else:
            here().baton.sleep(seconds)

    def refuse_signal(number: Any, handler: Any, /) -> Any:
        if here().baton.rank is not None:
            here().refuse("it sets a handler of a signal")
        return set_signal(number, handler)

    def leave_rank(status: int) -> NoReturn:
        if here().baton.rank is not None:
            raise RankLeftError(status)
        leave(status)

    def refuse_start(self: Any) -> None:
        here().refuse("it starts a process")

    def refuse_rpc(*_: Any, **__: Any) -> NoReturn:
        here().refuse("it starts RPC, which has threads and sockets of its own")

    module: Any = time
    module.sleep = sleep_or_give_way
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    rpc.init_rpc = rpc._init_rpc_backend = refuse_rpc
    module = signal
    module.signal = refuse_signal
    os._exit = leave_rank
    multiprocessing.process.BaseProcess.start = refuse_start  # type: ignore[method-assign]
    _refuse_cuda()
    sys.addaudithook(_hear)


def _refuse_cuda() -> None:
    lazy_init: Any = torch.cuda._lazy_init

    def init_cuda() -> None:
        if here().baton.rank is None:
            lazy_init()
            return
        if torch.cuda.is_available():
            here().refuse(USES_CUDA)
        try:
            lazy_init()
        except Exception as error:
            setattr(error, _MARK, True)  # code may catch it, and go on without CUDA
            raise

    torch.cuda._lazy_init = init_cuda


def _hear(event: str, given: tuple[Any, ...]) -> None:
    if here().baton.rank is None:
        return
    if event in _FORKS:
        here().refuse(f"it calls {event}")
    if event == "import" and given[0] in _OWN_TRANSPORT:
        here().refuse(f"it imports {given[0]}, which moves data by itself")


def place_of_cuda(error: BaseException | None) -> str:
    """Where code asked for CUDA, as " at FILE:LINE", if that is why it raised; or nothing."""
    while error is not None:
        if getattr(error, _MARK, False):
            frames = traceback.extract_tb(error.__traceback__)
            theirs = [frame for frame in frames if is_theirs(frame.filename)]
            return f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else " "
        error = error.__cause__ or error.__context__
    return ""
