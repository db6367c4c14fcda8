"""What ranks of an MPI world try; named by "tests.addons.mpi.mpi_jobs:NAME".

Each returns what it has compared, so that a job which compared nothing is noticed. Expected values
are small integers, worked out in Python, and exact in every dtype.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import join
from tests.world.jobs import Asked

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
SIZES = (1, 7, 4099)
REDUCE: dict[str, Callable[[list[int]], int]] = {
    "SUM": sum, "PRODUCT": math.prod, "MIN": min, "MAX": max,
}  # fmt: skip
BITS: dict[str, Callable[[int, int], int]] = {
    "BAND": int.__and__, "BOR": int.__or__, "BXOR": int.__xor__,
}  # fmt: skip


def reducible() -> Iterator[tuple[str, str]]:
    """Every dtype with every operation that it has."""
    for dtype in (*FLOATS, *INTEGERS):
        yield from ((dtype, op) for op in REDUCE)
    yield from ((dtype, "AVG") for dtype in FLOATS)
    yield from itertools.product((*INTEGERS, "bool"), BITS)
    yield from (("bool", op) for op in REDUCE)


def value(rank: int, index: int, op: str = "SUM") -> int:
    """An integer of rank and index: 1 to 4, and a multiple of three where three ranks divide."""
    return ((rank * 5 + index * 3) % 4 + 1) * (3 if op == "AVG" else 1)


def vector(rank: int, size: int, dtype: str, op: str = "SUM", start: int = 0) -> torch.Tensor:
    values = [value(rank, start + i, op) for i in range(size)]
    kept = [v % 2 for v in values] if dtype == "bool" else values
    return torch.tensor(kept, dtype=getattr(torch, dtype))


def combined(world: int, size: int, dtype: str, op: str, start: int = 0) -> torch.Tensor:
    """What the operation makes of all ranks' vectors."""
    result = []
    for i in range(start, start + size):
        values = [value(rank, i, op) for rank in range(world)]
        if dtype == "bool":
            truths = [v % 2 for v in values]
            name = {"SUM": "BOR", "PRODUCT": "BAND"}.get(op, op)
            values = [int(bool(t)) for t in truths]
            op_of = {"MIN": min, "MAX": max}.get(name)
            result.append(op_of(values) if op_of else _fold(BITS[name], values))
        elif op in BITS:
            result.append(_fold(BITS[op], values))
        else:
            result.append(sum(values) // world if op == "AVG" else REDUCE[op](values))
    return torch.tensor(result, dtype=getattr(torch, dtype))


def _fold(step: Callable[[int, int], int], values: list[int]) -> int:
    result = values[0]
    for v in values[1:]:
        result = step(result, v)
    return result


class Ledger:
    """Compares, and remembers what."""

    def __init__(self) -> None:
        self.compared: list[str] = []

    def same(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.dtype == expected.dtype, what
        assert torch.equal(actual, expected), f"{what}: actual {actual}, expected {expected}"
        self.compared.append(what)

    def refused(self, what: str, words: str, call: Callable[[], Any]) -> None:
        with pytest.raises((ValueError, RuntimeError), match=re.escape(words)):
            call()
        self.compared.append(what)


def enter(payload: bytes, fds: Descriptors) -> tuple[int, int]:
    job = msgspec.msgpack.decode(payload, type=Asked)
    join(job.rendezvous, fds[STORE])
    return job.rendezvous.rank, job.rendezvous.world


def reductions(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, world = enter(payload, fds)
    ledger = Ledger()
    for dtype, name in reducible():
        op = getattr(ReduceOp, name)
        for size in SIZES:
            own = vector(rank, size, dtype, name)
            expected = combined(world, size, dtype, name)
            reduced = own.clone()
            dist.all_reduce(reduced, op)
            ledger.same(f"all_reduce {dtype} {name}", reduced, expected)
            reduced = own.clone()
            dist.reduce(reduced, 1, op)
            ledger.same(f"reduce {dtype} {name}", reduced, expected if rank == 1 else own)
            whole = vector(rank, world * size, dtype, name)
            part = combined(world, size, dtype, name, start=rank * size)
            output = torch.zeros_like(own)
            dist.reduce_scatter(output, list(whole.chunk(world)), op)
            ledger.same(f"reduce_scatter {dtype} {name}", output, part)
            output = torch.zeros_like(own)
            dist.reduce_scatter_tensor(output, whole, op)
            ledger.same(f"reduce_scatter_tensor {dtype} {name}", output, part)
    ledger.refused("integer AVG", "does not support AVG of torch.int32", lambda: dist.all_reduce(
        torch.ones(2, dtype=torch.int32), ReduceOp.AVG))  # fmt: skip
    ledger.refused("float BAND", "does not support BAND of torch.float32", lambda: dist.all_reduce(
        torch.ones(2), ReduceOp.BAND))  # fmt: skip
    return msgspec.msgpack.encode(ledger.compared)


def moves(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, world = enter(payload, fds)
    ledger = Ledger()
    ranks = range(world)
    for dtype, size in itertools.product((*FLOATS, *INTEGERS, "bool"), SIZES):
        own = vector(rank, size, dtype)
        everybody = [vector(r, size, dtype) for r in ranks]

        tensor = own.clone()
        dist.broadcast(tensor, 2)
        ledger.same(f"broadcast {dtype}", tensor, everybody[2])

        outputs = [torch.zeros_like(own) for _ in ranks]
        dist.all_gather(outputs, own)
        ledger.same(f"all_gather {dtype}", torch.cat(outputs), torch.cat(everybody))

        output = torch.zeros(world * size, dtype=own.dtype)
        dist.all_gather_into_tensor(output, own)
        ledger.same(f"all_gather_into_tensor {dtype}", output, torch.cat(everybody))

        outputs = [torch.zeros_like(own) for _ in ranks]
        dist.gather(own, outputs if rank == 1 else None, dst=1)
        expected = torch.cat(everybody) if rank == 1 else torch.zeros_like(output)
        ledger.same(f"gather {dtype}", torch.cat(outputs), expected)

        output = torch.zeros_like(own)
        dist.scatter(output, everybody if rank == 1 else None, src=1)
        ledger.same(f"scatter {dtype}", output, own)

        outputs = [torch.zeros_like(own) for _ in ranks]
        dist.all_to_all(outputs, [vector(rank, size, dtype, start=to) for to in ranks])
        expected = torch.cat([vector(r, size, dtype, start=rank) for r in ranks])
        ledger.same(f"all_to_all {dtype}", torch.cat(outputs), expected)

        output = torch.zeros(world * size, dtype=own.dtype)
        sent = torch.cat([vector(rank, size, dtype, start=to) for to in ranks])
        dist.all_to_all_single(output, sent)
        ledger.same(f"all_to_all_single {dtype}", output, expected)

        # Rank r sends (to + 1) rows of two to rank `to`.
        rows = sum(to + 1 for to in ranks)
        sent = vector(rank, 2 * rows, dtype).view(rows, 2)
        output = torch.zeros(world * (rank + 1), 2, dtype=own.dtype)
        dist.all_to_all_single(output, sent, [rank + 1] * world, [to + 1 for to in ranks])
        begin = sum(to + 1 for to in range(rank))
        parts = [vector(r, 2 * rows, dtype).view(rows, 2)[begin : begin + rank + 1] for r in ranks]
        ledger.same(f"uneven all_to_all_single {dtype}", output, torch.cat(parts))

        room = torch.zeros_like(own)
        there, back = (rank + 1) % world, (rank - 1) % world
        works = [dist.isend(own, there), dist.irecv(room, back)]
        for work in works:
            work.wait()
        ledger.same(f"isend, irecv {dtype}", room, everybody[back])
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in ranks]
    dist.barrier()
    return msgspec.msgpack.encode(ledger.compared)


def layouts(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Tensors whose memory is not their elements in order, and those that cannot be written."""
    rank, world = enter(payload, fds)
    ledger = Ledger()
    size = 24
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.view(4, 6).t(), "every other": lambda t: t[::2],
        "column": lambda t: t.view(6, 4)[:, 1],
        "channels last": lambda t: t.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "offset": lambda t: t[5:17], "scalar": lambda t: t[3], "empty": lambda t: t[:0],
    }  # fmt: skip
    for name, view in views.items():
        whole = vector(rank, size, "float32")
        part, expected = view(whole), view(combined(world, size, "float32", "SUM"))
        dist.all_reduce(part)
        ledger.same(f"all_reduce {name}", part, expected)
        if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            untouched = vector(rank, size, "float32")
            view(untouched).copy_(expected)
            ledger.same(f"around {name}", whole, untouched)
        part = view(vector(rank, size, "float32")).clone(memory_format=torch.preserve_format)
        dist.broadcast(part, 1)
        ledger.same(f"broadcast {name}", part, view(vector(1, size, "float32")))
        outputs = [view(torch.zeros(size)) for _ in range(world)]
        dist.all_gather(outputs, view(vector(rank, size, "float32")))
        for r, output in enumerate(outputs):
            ledger.same(f"all_gather {name}", output, view(vector(r, size, "float32")))
        room = view(torch.zeros(size))
        dist.reduce_scatter(room, [view(vector(rank, size, "float32"))] * world)
        ledger.same(f"reduce_scatter {name}", room, expected)
        room, there, back = view(torch.zeros(size)), (rank + 1) % world, (rank - 1) % world
        works = [dist.isend(view(vector(rank, size, "float32")), there), dist.irecv(room, back)]
        for work in works:
            work.wait()
        ledger.same(f"message {name}", room, view(vector(back, size, "float32")))
    complex_numbers = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
    gathered = [torch.zeros_like(complex_numbers) for _ in range(world)]
    dist.all_gather(gathered, complex_numbers.conj().resolve_conj())
    ledger.same("complex", gathered[2], torch.complex(torch.ones(3), torch.full((3,), -2.0)))
    many = torch.ones(1).expand(4)
    ledger.refused("expanded", "share memory", lambda: dist.all_reduce(many))
    ledger.refused("uneven", "elements among those of", lambda: dist.all_gather(
        [torch.zeros(n + 1) for n in range(world)], torch.zeros(1)))  # fmt: skip
    ledger.refused("sparse", "dense tensors", lambda: dist.group.WORLD.broadcast(
        [torch.ones(2).to_sparse()], dist.BroadcastOptions()))  # fmt: skip
    return msgspec.msgpack.encode(ledger.compared)


def asynchronous(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, world = enter(payload, fds)
    ledger = Ledger()
    sizes = (5, 100_003, 3)
    parts = [vector(rank, size, "float32") for size in sizes]
    works = [dist.all_reduce(part, async_op=True) for part in parts]
    for i in (2, 0, 1) if rank else (1, 2, 0):  # in another order than begun, and than each other
        works[i].wait()
        ledger.same("all_reduce", parts[i], combined(world, sizes[i], "float32", "SUM"))
        assert works[i].is_completed()
        assert works[i].is_success()

    part = vector(rank, 50, "float32").view(5, 10).t()
    future = dist.all_reduce(part, async_op=True).get_future()
    expected = combined(world, 50, "float32", "SUM").view(5, 10).t()
    ledger.same("future", future.then(lambda f: f.value()[0] * 2).wait(), expected * 2)

    if rank == 0:  # one waits, its peers do not: they are the same collective all the same
        mixed = torch.ones(3)
        dist.all_reduce(mixed, async_op=True).wait()
    else:
        mixed = torch.ones(3)
        dist.all_reduce(mixed)
    ledger.same("mixed", mixed, torch.full((3,), float(world)))

    # Larger than any library sends without the receiver.
    large, room = torch.full((3_000_000,), float(rank)), torch.zeros(3_000_000)
    there, back = (rank + 1) % world, (rank - 1) % world
    works = [dist.isend(large, there, tag=7), dist.irecv(room, back, tag=7)]
    for work in works:
        work.wait()
    ledger.same("large ring", room, torch.full_like(room, float(back)))

    rooms = [torch.zeros(2) for _ in range(world)]
    operations = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), to) for to in range(world)]
    operations += [dist.P2POp(dist.irecv, r, n) for n, r in enumerate(rooms)]
    for work in dist.batch_isend_irecv([o for o in operations if o.peer != rank]):
        work.wait()
    rooms[rank] = torch.full((2,), float(rank))
    ledger.same("batched", torch.stack(rooms)[:, 0], torch.arange(float(world)))

    if rank == 0:
        came = []
        for _ in range(world - 1):
            room = torch.zeros(2)
            source = dist.recv(room)
            ledger.same("any source", room, torch.full((2,), float(source)))
            came.append(source)
        assert sorted(came) == list(range(1, world))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()
    if rank == 0:
        dist.send(torch.zeros(2), 1)
    elif rank == 1:
        ledger.refused("short message", "2 elements arrived for a buffer of 5", lambda: dist.recv(
            torch.zeros(5), 0))  # fmt: skip
    dist.barrier()
    return msgspec.msgpack.encode(ledger.compared)


def groups(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, world = enter(payload, fds)
    assert world == 3
    ledger = Ledger()
    members = ([0, 2], [1, 2], [2], [0, 1, 2])
    made = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, made, strict=True):
        if rank not in ranks:
            continue
        assert dist.get_group_rank(group, rank) == ranks.index(rank)
        total = torch.full((4,), float(rank + 1))
        dist.all_reduce(total, group=group)
        expected = torch.full((4,), float(sum(r + 1 for r in ranks)))
        ledger.same(f"all_reduce {ranks}", total, expected)
        root = torch.full((4,), float(rank))
        dist.broadcast(root, ranks[-1], group=group)
        ledger.same(f"broadcast {ranks}", root, torch.full((4,), float(ranks[-1])))
        outputs = [torch.zeros(1) for _ in ranks]
        dist.all_gather(outputs, torch.full((1,), float(rank)), group=group)
        ledger.same(f"all_gather {ranks}", torch.cat(outputs), torch.tensor(ranks).float())
    # Two groups, begun in different orders on the rank that is in both of them.
    if rank == 2:
        parts = {0: torch.ones(3), 1: torch.ones(3)}
        works = [dist.all_reduce(parts[n], group=made[n], async_op=True) for n in (1, 0)]
        for work in works:
            work.wait()
        ledger.same("crossed", parts[0] + parts[1], torch.full((3,), 4.0))
    else:
        part = torch.ones(3)
        dist.all_reduce(part, group=made[rank])
        ledger.same("crossed", part, torch.full((3,), 2.0))
    dist.destroy_process_group(made[3])
    dist.barrier()
    dist.destroy_process_group()
    return msgspec.msgpack.encode(ledger.compared)


class Sums(nn.Module):
    """Ten layers of weights whose gradients are integers: inputs are, and everything is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(40 + n)) for n in range(10)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(layer * x).sum() for layer in self.layers]).sum()


def ddp(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, world = enter(payload, fds)
    ledger = Ledger()
    for views in (False, True):
        model = DistributedDataParallel(Sums(), bucket_cap_mb=0.0005, gradient_as_bucket_view=views)
        for step in range(3):
            model.zero_grad()
            model(torch.tensor(float(world * (rank + step + 1)))).backward()
            expected = float(sum(r + step + 1 for r in range(world)))
            for layer in model.module.layers:
                assert layer.grad is not None
                ledger.same(f"views {views}", layer.grad, torch.full_like(layer, expected))
    return msgspec.msgpack.encode(ledger.compared)


def times_out(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """A collective that one rank never enters ends with the group's timeout, if nobody is there
    to see the hang before.
    """
    rank, _ = enter(payload, fds)
    ledger = Ledger()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    if rank == 0:
        ledger.refused("late", "all_reduce timed out after 0.3 s", lambda: dist.all_reduce(
            torch.ones(2), group=group))  # fmt: skip
    return msgspec.msgpack.encode(ledger.compared)
