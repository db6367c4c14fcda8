"""Backends that are wrong in one known way each: gloo, wrapped in Python.

Named by "tests.world.bad_backends:NAME"; each registers itself and returns its name. What they do
not define, they refuse.
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

WORLD = 3


class Faithful(dist.ProcessGroup):
    """Passes everything on."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.place, self.ranks = rank, size
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return type(self).__name__.lower()

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self.gloo.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self.gloo.broadcast(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self.gloo.reduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.gloo.allgather(outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.gloo.alltoall(outputs, inputs, opts)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self.gloo.send(tensors, to, tag)

    def recv(self, tensors: Any, sender: int, tag: int) -> Any:
        return self.gloo.recv(tensors, sender, tag)

    def barrier(self, opts: Any) -> Any:
        return self.gloo.barrier(opts)


def done() -> Any:
    future: Any = Future()
    future.set_result(None)
    return _create_work_from_future(future)


class DropsARank(Faithful):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == dist.ReduceOp.SUM and self.place == self.ranks - 1:
            tensors[0].zero_()
        return super().allreduce(tensors, opts)


class Stale(Faithful):
    last: torch.Tensor | None = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        super().allreduce(tensors, opts).wait()
        result = tensors[0].clone()
        if self.last is not None and self.last.shape == result.shape:
            tensors[0].copy_(self.last)
        self.last = result
        return done()


class HangsInAllGather(Faithful):
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if self.place == 1:
            time.sleep(1000)
        return super().allgather(outputs, inputs, opts)


class AbortsInReduce(Faithful):
    def reduce(self, tensors: Any, opts: Any) -> Any:
        if self.place == 1:
            os.abort()
        return super().reduce(tensors, opts)


class LeavesInReduce(Faithful):
    def reduce(self, tensors: Any, opts: Any) -> Any:
        if self.place == 0:  # the rank that serves the store
            os._exit(0)
        return super().reduce(tensors, opts)


class Refuses(Faithful):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        raise RuntimeError("no all_reduce today")


class RefusesOnOneRank(Faithful):
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        work = super().broadcast(tensors, opts)
        work.wait()
        if self.place == 2:
            raise RuntimeError("not on rank 2")
        return work


class StrandsItsPeers(Faithful):
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if self.place == 2:
            raise RuntimeError("not on rank 2")
        return self.gloo.barrier(dist.BarrierOptions())  # type: ignore[attr-defined]


class DoesNothing(Faithful):
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return done()


class SwapsRanks(Faithful):
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather([list(reversed(outputs[0]))], inputs, opts)


class WritesOutside(Faithful):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        view = tensors[0]
        end = view.storage_offset() + view.numel()
        view.as_strided((1,), (1,), end).fill_(1)
        return work


class ClobbersItsInput(Faithful):
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().allgather(outputs, inputs, opts)
        work.wait()
        inputs[0].zero_()
        return work


class Narrow(Faithful):
    """Adds in float32, whatever it is given."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        narrow = tensors[0].float()
        super().allreduce([narrow], opts).wait()
        tensors[0].copy_(narrow)
        return done()


class MeansTooMuch(Faithful):
    """Divides by one rank too few."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        super().allreduce(tensors, opts).wait()
        if opts.reduceOp == dist.ReduceOp.AVG:
            tensors[0].mul_(self.ranks / (self.ranks - 1))
        return done()


class DoesNotWait(Faithful):
    def barrier(self, opts: Any) -> Any:
        return done()


class WaitsForTheFirst(Faithful):
    """Everybody waits until rank 0 has come, and for nobody else."""

    def barrier(self, opts: Any) -> Any:
        options = dist.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank = 0
        return self.gloo.broadcast([torch.zeros(1)], options)


class MistakesRanks(Faithful):
    """Takes the root of a smaller group for a rank of the world."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = (opts.rootRank + WORLD - self.ranks) % self.ranks
        return super().broadcast(tensors, opts)


class DoesNotWaitForWork(Faithful):
    """Says that the work is done before it is."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        kept = tensors[0].clone()
        super().allreduce([kept], opts).wait()
        if not opts.asyncOp:
            tensors[0].copy_(kept)
        return done()


class MixesMessages(Faithful):
    """The second of two messages overtakes the first."""

    held: tuple[Any, int, int] | None = None

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        if tag != 0 or self.held is None:
            self.held = (tensors, to, tag)
            return done()
        first, self.held = self.held, None
        super().send(tensors, to, tag).wait()
        return super().send(*first)


class LeavesAGroupBehind(Faithful):
    """What is refused has left the group out of step: the next call would take its message."""

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        work = super().send(tensors, to, tag)
        if tensors[0].dtype == torch.float64:
            raise RuntimeError("no float64, but a message is under way")
        return work

    def recv(self, tensors: Any, sender: int, tag: int) -> Any:
        if tensors[0].dtype == torch.float64:
            raise RuntimeError("no float64")
        return super().recv(tensors, sender, tag)


class FailsToStart(Faithful):
    def __init__(self, *about: Any) -> None:
        raise RuntimeError("no such interconnect")


def _registered(kind: type[Faithful]) -> str:
    name = kind.__name__.lower()

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Faithful:
        return kind(store, rank, size, timeout)

    dist.Backend.register_backend(name, create, devices=["cpu"])
    return name


def __getattr__(name: str) -> Any:
    """`bad_backends:Stale.register` would do as well; `:stale` reads better."""
    kinds: list[type[Faithful]] = [Faithful, *Faithful.__subclasses__()]
    for kind in kinds:
        if kind.__name__.lower() == name.replace("_", ""):
            return lambda: _registered(kind)
    raise AttributeError(name)


def returns_no_name() -> int:
    return 3


def raises() -> str:
    raise RuntimeError("no license")
