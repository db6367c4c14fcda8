"""Tests if the reduction orders that the bitwise layer relies on hold on this machine, with this
torch.

Orders are facts about a backend and about DDP, not promises: a release may change them. So before
the layer is used, ranks run the bare collective (and a bare DDP model) on known vectors, and
compare bitwise with the prediction. If that fails, the bitwise layer falls back to the rounding
bound, and the report says so.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck import backends
from distcheck.contract import BackendReduce, Contract, DDPBuckets, Order
from distcheck.judge.oracles.order_exact import expected_gradients
from distcheck.machine import devices, seeds
from distcheck.training.jobs import CALIBRATE, CalibrationRequest, CalibrationResult
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import Rendezvous, join

SIZES = (3, 1003)  # fewer elements than ranks, and an odd number
_DRAWN = 10_007
_STEPS = 3  # DDP rebuilds its buckets after the first or the second


@CALIBRATE.does
def calibrate_rank(
    job: CalibrationRequest, fds: Descriptors, reporter: Reporter
) -> CalibrationResult:
    seeds.pin_determinism()
    # All tensors below are created on the rank's device.
    torch.set_default_device(devices.enter(job.device, int(os.environ["LOCAL_RANK"])))
    join(job.rendezvous, fds[STORE])
    reporter.progress(0, "calibrate")
    return CalibrationResult(failures=tuple(_try_orders(job)))


def _try_orders(job: CalibrationRequest) -> Iterator[tuple[Order, str]]:
    """Yield the failure of each order; all ranks run the same collectives, and rank 0 compares."""
    backend = job.rendezvous.backend
    reduce_sum, all_reduce_sum = backends.reduce_sum(backend), backends.all_reduce_sum(backend)
    if any(not isinstance(order, BackendReduce) for order in job.orders):
        all_reduce_failure = _try_sums(job, "all_reduce", dist.all_reduce, all_reduce_sum)
    for order in job.orders:
        if isinstance(order, BackendReduce):
            yield order, _try_sums(job, "reduce", partial(dist.reduce, dst=0), reduce_sum)
        elif isinstance(order, DDPBuckets) and all_reduce_sum is not None:
            buckets_failure = _try_ddp(job, order)
            yield order, all_reduce_failure or buckets_failure
        else:
            yield order, all_reduce_failure


def known_vector(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a vector [elements] in (-1, 1) that every process on a machine can compute for each
    rank. It repeats a few thousand random elements: any of them reveals the order of ranks there.
    """
    generator = torch.Generator()
    generator.manual_seed(rank + 1)
    drawn = torch.rand(min(elements, _DRAWN), generator=generator, device="cpu").mul_(2).sub_(1)
    whole = drawn.to(torch.get_default_device(), dtype).repeat(-(-elements // max(1, len(drawn))))
    return whole[:elements]


def _cases(job: CalibrationRequest) -> list[tuple[torch.dtype, int]]:
    """Return small sizes in every dtype, and a large one that rings cannot divide evenly."""
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in job.dtypes]
    large = (2 * job.rendezvous.world + 1 << 20) // dtypes[0].itemsize + 1
    return [(dtype, size) for dtype in dtypes for size in SIZES] + [(dtypes[0], large)]


def _try_sums(
    job: CalibrationRequest,
    name: str,
    collective: Callable[[torch.Tensor], object],
    known: Callable[[list[torch.Tensor]], torch.Tensor] | None,
) -> str:
    """Compare a collective's sums with the prediction, on rank 0; the others take part."""
    if known is None:
        return f"the reduction order of {name} on {job.rendezvous.backend} is not known"
    failure = ""
    for dtype, elements in _cases(job):
        reduced = known_vector(job.rendezvous.rank, elements, dtype)
        collective(reduced)
        if job.rendezvous.rank != 0:
            continue
        ranks = range(job.rendezvous.world)
        if not torch.equal(reduced, known([known_vector(r, elements, dtype) for r in ranks])):
            failure = (
                f"{name} of {elements} elements in {str(dtype).removeprefix('torch.')} "
                f"on {job.rendezvous.backend} has a different reduction order than predicted"
            )
    return failure


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 1000), nn.Tanh(), nn.Linear(1000, 16), nn.Linear(16, 4))
    return layers.to(dtype)


def _try_ddp(job: CalibrationRequest, order: DDPBuckets) -> str:
    failures = [_try_ddp_in(getattr(torch, name), job.rendezvous, order) for name in job.dtypes]
    return next(filter(None, failures), "")


def _try_ddp_in(dtype: torch.dtype, rendezvous: Rendezvous, order: DDPBuckets) -> str:
    inputs = [known_vector(r, 8 * 300, dtype).view(8, 300) for r in range(rendezvous.world)]
    together = DistributedDataParallel(
        _model(dtype),
        bucket_cap_mb=None if order.first_mib != order.cap_mib else order.cap_mib,
        find_unused_parameters=order.rebuilt_at is None,
        static_graph=order.rebuilt_at == 2,
    )
    actual = [_gradients(together, inputs[rendezvous.rank]) for _ in range(_STEPS)]
    if rendezvous.rank != 0:
        return ""
    alone = _model(dtype)
    ready: list[int] = []
    for index, parameter in enumerate(alone.parameters()):
        parameter.register_hook(lambda _, index=index: ready.append(index))
    shards = [_gradients(alone, part) for part in inputs]
    for step in range(_STEPS):
        predicted = expected_gradients(
            Contract(order=order, scale="multiply-before"),
            rendezvous.backend,
            shards,
            weights=[1.0] * rendezvous.world,
            step=step,
            ready_order=ready[: len(ready) // rendezvous.world],
            like=list(alone.parameters()),
        )
        for got, want in zip(actual[step], predicted, strict=True):
            if want is None or not torch.equal(got, want):
                return f"DDP's buckets at step {step} differ from those predicted for {order}"
    return ""


def _gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(inputs).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
