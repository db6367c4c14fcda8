"""Jobs for ranks that are processes or threads; each is named by this module and its function."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import ReduceOp

from distcheck.machine import seeds
from distcheck.machine.shared_tensors import raw_bytes
from distcheck.records import Case
from distcheck.training.building import open_ingredients
from distcheck.training.loading import load_strategy
from distcheck.training.loop import Loop
from distcheck.training.recorder import LoopObserver
from distcheck.training.whole_tensors import as_full_tensor
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import join
from tests.world.jobs import Asked, _join

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
OPS = ("SUM", "PRODUCT", "MIN", "MAX")


def _vector(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + elements)
    if not dtype.is_floating_point:
        return torch.randint(0, 7, (elements,), generator=generator).to(dtype)
    return (torch.rand(elements, generator=generator) * 2 - 1).to(dtype)


def _reductions(rank: int, size: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for dtype in DTYPES:
        for op in OPS:
            tensor = _vector(rank, 1003, dtype)
            dist.all_reduce(tensor, getattr(ReduceOp, op))
            yield f"all_reduce {op} {dtype}", [tensor]
        tensor = _vector(rank, 501, dtype)
        dist.reduce(tensor, size - 1)
        yield f"reduce {dtype}", [tensor] if rank == size - 1 else []
    for elements in (1, size - 1, 300_007):
        tensor = _vector(rank, elements, torch.float32)
        dist.all_reduce(tensor)
        yield f"all_reduce of {elements}", [tensor]
    tensor = _vector(rank, 2 * 3 * 4 * 5, torch.float32).view(2, 3, 4, 5)
    tensor = tensor.to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    yield "all_reduce channels_last", [tensor]
    as_full_tensor, part = _vector(rank, 12 * size, torch.float32), torch.empty(12)
    dist.reduce_scatter_tensor(part, as_full_tensor)
    yield "reduce_scatter_tensor", [part]
    part = torch.empty(12)
    dist.reduce_scatter(part, list(_vector(rank, 12 * size, torch.float32).chunk(size)))
    yield "reduce_scatter", [part]
    part, sizes = torch.empty(rank + 1), range(1, size + 1)
    dist.reduce_scatter(part, list(_vector(rank, sum(sizes), torch.float32).split(list(sizes))))
    yield "reduce_scatter of unequal parts", [part]
    many = [_vector(rank, n, torch.float32) for n in (7, 1, 40)]
    work = dist.all_reduce_coalesced(many, async_op=True)
    work.wait()
    yield "all_reduce_coalesced", many


def _moves(rank: int, size: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    tensor = _vector(rank, 9, torch.float32)
    dist.broadcast(tensor, 1)
    yield "broadcast", [tensor]
    parts = [torch.empty(5) for _ in range(size)]
    dist.all_gather(parts, _vector(rank, 5, torch.float32))
    yield "all_gather", parts
    together = torch.empty(5 * size)
    dist.all_gather_into_tensor(together, _vector(rank, 5, torch.float32))
    yield "all_gather_into_tensor", [together]
    parts = [torch.empty(4) for _ in range(size)]
    dist.gather(_vector(rank, 4, torch.float32), parts if rank == 1 else None, dst=1)
    yield "gather", parts if rank == 1 else []
    part = torch.empty(6)
    dist.scatter(part, [_vector(r, 6, torch.float32) for r in range(size)] if rank == 0 else None)
    yield "scatter", [part]
    received = [torch.empty(4) for _ in range(size)]
    dist.all_to_all(received, list(_vector(rank, 4 * size, torch.float32).chunk(size)))
    yield "all_to_all", received
    rows = torch.empty(2 * size, 3)
    dist.all_to_all_single(rows, _vector(rank, 6 * size, torch.float32).view(2 * size, 3))
    yield "all_to_all_single", [rows]
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    said = ["from rank 0", 5] if rank == 0 else [None, None]
    dist.broadcast_object_list(said, 0)
    assert said == ["from rank 0", 5]
    dist.barrier()


def _messages(rank: int, size: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    received = torch.empty(8)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    sent = [
        dist.P2POp(dist.isend, _vector(rank, 8, torch.float32), ahead),
        dist.P2POp(dist.irecv, received, behind),
    ]
    for work in dist.batch_isend_irecv(sent):
        work.wait()
    yield "batch_isend_irecv", [received]
    if rank == 0:
        by_tag = [torch.empty(3), torch.empty(3)]
        dist.recv(by_tag[1], 1, tag=2)
        dist.recv(by_tag[0], 1, tag=1)
        yield "recv by tag", by_tag
    elif rank == 1:
        works = [dist.isend(_vector(tag, 3, torch.float32), 0, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    group = dist.new_group([0, size - 1])
    tensor = _vector(rank, 11, torch.float32)
    if rank in (0, size - 1):
        dist.all_reduce(tensor, group=group)
    yield "all_reduce of two", [tensor]
    works = [dist.all_reduce(t, async_op=True) for t in (tensor, tensor.clone())]
    for work in reversed(works):
        assert work is not None
        work.wait()
    yield "two at once", [tensor]


def calls(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """A digest of what each operation leaves."""
    rank, _ = _join(payload, fds)
    size = dist.get_world_size()
    found = {}
    for family in (_reductions, _moves, _messages):
        for name, tensors in family(rank, size):
            digest = xxhash.xxh3_128()
            for tensor in tensors:
                plain = tensor.contiguous()
                digest.update(raw_bytes(plain))
            found[name] = digest.hexdigest()
    return msgspec.msgpack.encode(found)


def trains(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """A digest of every parameter, gradient and buffer, after some steps."""
    asked = msgspec.msgpack.decode(payload, type=Asked)
    case = msgspec.convert(asked.about["case"], Case)
    seeds.pin_determinism()
    join(asked.rendezvous, fds[STORE])
    ingredients = open_ingredients(case, b"", None)
    rank = asked.rendezvous.rank
    strategy = load_strategy(case.strategy)
    loop = Loop(ingredients, strategy, LoopObserver(), rank=rank, progress=reporter.progress)
    digest = xxhash.xxh3_128()
    for step in range(case.steps):
        loss, _, _ = loop.step(step)
        digest.update(repr(loss).encode())
        for tensor in (*loop.model.parameters(), *loop.model.buffers()):
            for one in (tensor, tensor.grad):
                plain = torch.empty(0) if one is None else as_full_tensor(one).detach().contiguous()
                digest.update(raw_bytes(plain))
    loop.close()
    return digest.digest()


def own_state(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """What processes do not share: each rank changes it, lets the others run, and looks again."""
    rank, about = _join(payload, fds)
    for _ in range(3):
        from tests.world import counted  # each rank its own, also where it is imported again

        counted.COUNT += 1
        os.environ["OWN"] = str(rank)
        torch.manual_seed(rank)
        random.seed(rank)
        os.chdir(about["folders"][rank])
        torch.set_default_dtype(torch.float64 if rank % 2 else torch.float32)
        dist.barrier()
        drawn = float(torch.rand(())), random.random()
        torch.manual_seed(rank)
        random.seed(rank)
        assert drawn == (float(torch.rand(())), random.random())
        assert os.environ["OWN"] == os.getenv("OWN") == os.environ["RANK"] == str(rank)
        assert Path.cwd() == Path(about["folders"][rank])
        assert torch.get_default_dtype() == (torch.float64 if rank % 2 else torch.float32)
        assert dist.get_rank() == rank
    print(f"rank {rank} prints")
    return str(counted.COUNT).encode()


def _odd_operation(rank: int) -> None:
    if rank == 2:
        dist.reduce(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def _other_op(rank: int) -> None:
    dist.all_reduce(torch.ones(3), ReduceOp.MAX if rank == 2 else ReduceOp.SUM)


def _other_root(rank: int) -> None:
    dist.broadcast(torch.ones(3), 1 if rank == 2 else 0)


def _other_size(rank: int) -> None:
    dist.all_reduce(torch.ones(4 if rank == 2 else 3))


def _other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 2 else torch.float32))


def _other_splits(rank: int) -> None:
    splits = [2, 1, 1, 1] if rank == 2 else [1, 1, 1, 1]
    dist.all_to_all_single(torch.empty(sum(splits)), torch.ones(4), output_split_sizes=splits)


def _other_message(rank: int) -> None:
    if rank == 2:
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        dist.recv(torch.ones(3), 2)


def _half_and_half(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank % 2))


def _all_receive(rank: int) -> None:
    dist.recv(torch.empty(2), (rank + 1) % 4)


def _both_send(rank: int) -> None:
    dist.send(torch.empty(2), rank ^ 1)


def _one_too_few(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank != 2:
        dist.all_reduce(torch.ones(2))


def _sleeps(rank: int) -> None:
    if rank == 2:
        time.sleep(1000)
    dist.barrier()


def _polls(rank: int) -> None:
    if rank == 2:
        time.sleep(0.5)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    while not work.is_completed():
        pass


def _locks(rank: int) -> None:
    if rank == 2:
        lock = threading.Lock()
        with lock:
            lock.acquire()
    dist.barrier()


def _spins(rank: int) -> None:
    while rank == 2:
        pass
    dist.barrier()


def _waits_for_a_queue(rank: int) -> None:
    if rank == 2:
        queue.Queue[int]().get()
    dist.barrier()


def _waits_for_a_thread(rank: int) -> None:
    if rank == 2:
        threading.Event().wait()
    dist.barrier()


def _waits_for_a_person(rank: int) -> None:
    if rank == 2:
        input()
    dist.barrier()


def _waits_for_a_socket(rank: int) -> None:
    with socket.socket() as own:
        if rank == 2:
            own.bind(("127.0.0.1", 0))
            own.listen()
            own.accept()
    dist.barrier()


def _forks(rank: int) -> None:
    if rank == 2 and os.fork() == 0:
        sys.exit()


def _waits_for_a_while(rank: int) -> None:
    if rank == 2:
        dist.irecv(torch.ones(3), 0).wait(timedelta(seconds=2))
    dist.barrier()


def _makes_a_group_with_a_limit(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == 2:
        dist.broadcast(torch.ones(3), 0, group)
    dist.barrier()


def _starts_a_process(rank: int) -> None:
    multiprocessing.get_context("spawn").Process(target=print).start()


def _starts_a_pool(rank: int) -> None:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        pool.submit(print).result()


def _spawns(rank: int) -> None:
    torch.multiprocessing.spawn(print, nprocs=1)  # type: ignore[attr-defined]


def _uses_a_gpu(rank: int) -> None:
    torch.ones(1).cuda()


def _looks_for_a_gpu(rank: int) -> None:
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.ones(1).cuda()
    dist.barrier()


def _imports_mpi(rank: int) -> None:
    import mpi4py  # type: ignore[import-not-found, unused-ignore]  # noqa: F401


def _imports_ray(rank: int) -> None:
    from ray import train  # type: ignore[import-not-found]  # noqa: F401


def _handles_a_signal(rank: int) -> None:
    signal.signal(signal.SIGUSR2, lambda *_: None)


def _imports_another_transport(rank: int) -> None:
    import horovod  # type: ignore[import-not-found]  # noqa: F401


def _runs_a_command(rank: int) -> None:
    subprocess.run(["true"], check=True)
    dist.barrier()


def _talks_from_a_pool(rank: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(dist.barrier).result()


def _talks_from_a_thread(rank: int) -> None:
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    thread.start()
    thread.join()


def _starts_rpc(rank: int) -> None:
    from torch.distributed import rpc

    rpc.init_rpc(f"rank {rank}", rank=rank, world_size=4)


def _moves_something_else(rank: int) -> None:
    dist.all_reduce(torch.ones(2).to_sparse())


def _waits_for_futures_out_of_order(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    if rank % 2:
        groups.reverse()
    futures = []
    for group in groups:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        futures.append(work.get_future().then(lambda done: done.value()[0] / 4))
    assert [future.wait().item() for future in futures] == [1, 1]


def _waits_for_futures_in_backward(rank: int) -> None:
    weight = torch.ones(3, requires_grad=True)

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        future = dist.all_reduce(parameter.grad, async_op=True).get_future()
        if rank % 2:
            torch.futures.wait_all([future])
        while not future.done():
            time.sleep(0.001)
        parameter.grad /= 4

    weight.register_post_accumulate_grad_hook(average)
    (weight * rank).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.5] * 3


def _trains_until_all_have_ended(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with model.join():
        for _ in range(rank + 1):
            model(torch.ones(1, 2)).sum().backward()


def _asks_the_store(rank: int) -> None:
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    before = store.num_keys()
    dist.barrier()
    while store.compare_set("lock", "", str(rank)) != str(rank).encode():
        pass
    time.sleep(0.01)
    store.append("passed", str(rank))  # type: ignore[attr-defined]
    store.delete_key("lock")
    store.multi_set([f"there {rank}"], [str(rank)])  # type: ignore[attr-defined]
    while store.num_keys() < before + 5:
        pass
    store.add("arrived", 1)
    while store.add("arrived", 0) < 4:
        pass
    assert sorted(store.get("passed")) == sorted(b"0123")
    assert store.multi_get([f"there {other}" for other in range(4)]) == [b"0", b"1", b"2", b"3"]


def _asks_for_gloo(rank: int) -> None:
    group = dist.new_group([0, 1, 2, 3], backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total == 4
    assert dist.get_backend() == dist.get_backend(group) == "gloo"
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    dist.group.WORLD.allreduce(total, ReduceOp.MAX).wait()
    dist.group.WORLD.allreduce([total]).wait()
    dist.group.WORLD.broadcast(total, 2).wait()
    assert total == 16


def _waits_for_a_key_for_a_while(rank: int) -> None:
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=2))
    dist.barrier()


def _makes_a_world_of_its_own(rank: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=4)


def _defines_an_operator(rank: int) -> None:
    @torch.library.custom_op("of_a_rank::twice", mutates_args=())
    def twice(tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


PROGRAMS: dict[str, Callable[[int], None]] = {
    name.removeprefix("_"): program
    for name, program in vars().copy().items()
    if name.startswith("_")
    and getattr(program, "__annotations__", {}).get("rank") is int
    and list(program.__annotations__) == ["rank", "return"]
}


def runs(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """One of the programs above."""
    rank, about = _join(payload, fds)
    reporter.progress(1, "sync")
    PROGRAMS[about["program"]](rank)
    return b""


def keeps(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Every rank sets each thing that code may keep in a process, lets the others run, and looks
    again. Returns what it sees that it would not see by itself.
    """
    rank, _ = _join(payload, fds)
    from tests.world.kept_by_ranks import PROBES  # each rank its own

    wrong = []
    for name, probe in PROBES.items():
        probe.put(rank)
        dist.barrier()
        found, expected = probe.get(), probe.expected(rank)
        dist.barrier()
        if found != expected:
            wrong.append(f"rank {rank}, {name}: {found!r}, not {expected!r}")
    return "; ".join(wrong).encode()
