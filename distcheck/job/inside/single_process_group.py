"""Stand-ins that let a script for many ranks run as a single process.

The collectives of the one-rank process group are copies that need no threads or sockets. A replay
may fork, and a fork would lose the threads of a real backend. If a script starts its ranks itself,
the first rank runs in the script's process.
"""

import dataclasses
import functools
import multiprocessing.process
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import synchronize
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from distcheck.backends._python_group import PythonGroup, PythonWork, Tensors
from distcheck.job.inside.tensors import leaves
from distcheck.machine import compat

NAME = "distcheck_alone"
_COUNTS = re.compile(r"world|n?proc|gpu|rank|device", re.IGNORECASE)
called = ""  # the script's next collective; DistributedDataParallel broadcasts buffers by itself
doubles = False  # if True, collectives double their results, to detect code that uses them


class _Done(PythonWork):
    """A completed operation."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        """Return a completed future that a GPU stream may wait for."""
        gpus = {tensor.device for tensor in leaves(self._results) if tensor.is_cuda}
        future: Any = torch.futures.Future(devices=[*gpus])
        future.set_result(self._results)
        return future


def _done(results: Any) -> _Done:
    for tensor in leaves(results) if doubles else ():
        if tensor.is_floating_point() and tensor.numel() > 1:
            tensor.detach().mul_(2)
    return _Done(results)


class SingleProcessGroup(PythonGroup):
    """Process group of world size 1."""

    torch_name = NAME

    def set_timeout(self, timeout: Any) -> None:
        """Do nothing: no operation takes time."""

    def shutdown(self) -> None:
        """Do nothing: there is nothing to shut down."""

    abort = shutdown

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Return the tensors unchanged: with one rank, this is their sum, mean or maximum."""
        return _done(tensors)

    allreduce_coalesced = reduce = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        """Return the tensors. In a copy that doubles results (`doubles`), they are doubled only if
        the script itself called broadcast.
        """
        global called
        by_script, called = called.startswith("broadcast"), ""
        return _done(tensors) if by_script else _Done(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            output[0].copy_(given)
        return _done(outputs)

    gather = allgather

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Copy the input, in the output's shape."""
        output.copy_(given.reshape(output.shape))
        return _done([output])

    reduce_scatter_single = all_gather_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced(outputs, inputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(given[0])
        return _done(outputs)

    scatter = reduce_scatter

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, *splits_and_options: Any
    ) -> Any:
        return self.all_gather_single(output, given)

    def barrier(self, opts: Any = None) -> Any:
        """Return a completed operation."""
        return _done([])

    def _together(self, works: Sequence[Any], results: Tensors) -> Any:
        return _Done(results)


def install(*, forks: bool = True) -> None:
    """Replace the process groups of a script by `SingleProcessGroup`."""
    if forks:
        _without_device_threads()
    devices = ["cpu"] if forks else ["cpu", "cuda"]
    dist.Backend.register_backend(
        NAME, lambda options, _: SingleProcessGroup(options), extended_api=True, devices=devices
    )
    begin, subgroup = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin(NAME, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return subgroup([0], backend=NAME)

    from torch.distributed import device_mesh

    make = device_mesh.init_device_mesh

    @functools.wraps(make)
    def init_device_mesh(device_type: str, mesh_shape: Any, *args: Any, **kwargs: Any) -> Any:
        return make(device_type, (1,) * len(tuple(mesh_shape)), *args, **kwargs)

    for module in (dist, device_mesh):
        setattr(module, "init_device_mesh", init_device_mesh)  # noqa: B010
    for module in (dist, dist.distributed_c10d):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010
        setattr(module, "new_group", new_group)  # noqa: B010
        # A server waits for the clients of all ranks.
        setattr(module, "TCPStore", lambda *_, **__: dist.HashStore())  # type: ignore[attr-defined]  # noqa: B010


def _without_device_threads() -> None:
    """Make autograd run on the calling thread.

    Autograd's device threads are lost in a fork, and the copy's backward pass would raise or abort.
    Even without a GPU, torch's fake tensors (used by FSDP2) pretend to be on eight GPUs, so
    autograd would start these threads.
    """
    compat.START_DEVICE_THREADS.replace(lambda _: lambda: None)


# -- scripts that start their own ranks ------------------------------------------------------------


def run_first_rank(world: int) -> None:
    """Make functions that start `world` ranks run only the first of them, in this process, with
    barriers for a single process.
    """
    spawning: Any = torch.multiprocessing

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> Any:
        fn(0, *with_one_rank(tuple(args), world))
        return SimpleNamespace(join=lambda *_: True, pids=list, processes=[])

    for module in (spawning, spawning.spawn if hasattr(spawning.spawn, "spawn") else spawning):
        module.spawn = module.start_processes = spawn

    def start(process: Any) -> None:
        process._target(
            *with_one_rank(process._args, world), **with_one_rank(process._kwargs, world)
        )

    barrier: Any = synchronize.Barrier
    begin = barrier.__init__
    barrier.__init__ = lambda own, n, *a, **k: begin(own, with_one_rank(n, world), *a, **k)
    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign, assignment]


def with_one_rank(value: Any, world: int) -> Any:
    """Replace the world size by 1 in arguments: integers equal to `world`, and attributes or keys
    with such a name.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return 1 if value == world else value
    if isinstance(value, tuple):
        return tuple(with_one_rank(one, world) for one in value)
    if isinstance(value, Mapping):
        return {
            key: with_one_rank(one, world) if _COUNTS.search(str(key)) else one
            for key, one in value.items()
        }
    if isinstance(value, Namespace) or dataclasses.is_dataclass(value):
        for name, one in list(vars(value).items()):
            if _COUNTS.search(name) and type(one) is int and one == world:
                setattr(value, name, 1)
    return value
