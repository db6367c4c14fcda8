"""Whether the reduction orders that X relies on hold on this machine, with this torch.

Orders are facts about a backend and about DDP, not promises: a release may change them. So
before anything is judged by X, ranks run the bare collective (and a bare DDP model) on vectors
known to all, and compare with the prediction to the bit. Where that fails, X falls back to R,
and the report says so.
"""

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck import backends, seeds
from distcheck.contract import Contract, DDPBuckets
from distcheck.jobs import Calibration, CalibrationJob
from distcheck.oracles.order_exact import expected_gradients
from distcheck.worlds.child import Reporter
from distcheck.worlds.rendezvous import Rendezvous, join

SIZES = (3, 1003)  # fewer elements than ranks, and an odd number
_STEPS = 3  # DDP rebuilds its buckets after the first


def calibrate_rank(payload: bytes, fds: list[int], reporter: Reporter) -> bytes:
    """The job of one calibrating rank; fds: the listening socket."""
    job = msgspec.msgpack.decode(payload, type=CalibrationJob)
    seeds.pin_determinism()
    join(job.rendezvous, fds[0])
    reporter.progress(0, "calibrate")
    failures = {}
    if "all-reduce" in job.orders or "ddp-buckets" in job.orders:
        failures["all-reduce"] = _try_all_reduce(job)
    if "ddp-buckets" in job.orders:
        failures["ddp-buckets"] = failures["all-reduce"] or _try_ddp(job)
    return msgspec.msgpack.encode(Calibration(failures=failures))


def known_vector(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A vector [elements] in (-1, 1) that every process on a machine can make for every rank."""
    generator = torch.Generator()
    generator.manual_seed(rank + 1)
    return torch.rand(elements, generator=generator).mul_(2).sub_(1).to(dtype)


def _cases(job: CalibrationJob) -> list[tuple[torch.dtype, int]]:
    """Small sizes in every dtype, and one that no ring cuts into the least number of segments."""
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in job.dtypes]
    large = (2 * job.rendezvous.world + 1 << 20) // dtypes[0].itemsize + 1
    return [(dtype, size) for dtype in dtypes for size in SIZES] + [(dtypes[0], large)]


def _try_all_reduce(job: CalibrationJob) -> str:
    """Rank 0 compares; the others take part."""
    known = backends.all_reduce_sum(job.rendezvous.backend)
    if known is None:
        return f"the reduction order of {job.rendezvous.backend} is not known"
    failure = ""
    for dtype, elements in _cases(job):
        reduced = known_vector(job.rendezvous.rank, elements, dtype)
        dist.all_reduce(reduced)
        if job.rendezvous.rank != 0:
            continue
        ranks = range(job.rendezvous.world)
        if not torch.equal(reduced, known([known_vector(r, elements, dtype) for r in ranks])):
            failure = (
                f"all_reduce of {elements} elements in {str(dtype).removeprefix('torch.')} "
                f"on {job.rendezvous.backend} adds in another order than predicted"
            )
    return failure


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 1000), nn.Tanh(), nn.Linear(1000, 16), nn.Linear(16, 4))
    return layers.to(dtype)


def _try_ddp(job: CalibrationJob) -> str:
    failures = [_try_ddp_in(getattr(torch, name), job.rendezvous) for name in job.dtypes]
    return next(filter(None, failures), "")


def _try_ddp_in(dtype: torch.dtype, rendezvous: Rendezvous) -> str:
    inputs = [known_vector(r, 8 * 300, dtype).view(8, 300) for r in range(rendezvous.world)]
    together = DistributedDataParallel(_model(dtype))
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
            Contract(order=DDPBuckets(), scale="multiply-before"),
            rendezvous.backend,
            shards,
            weights=[1.0] * rendezvous.world,
            step=step,
            ready_order=ready[: len(ready) // rendezvous.world],
        )
        for got, want in zip(actual[step], predicted, strict=True):
            if want is None or not torch.equal(got, want):
                return f"DDP's buckets at step {step} are not the ones predicted"
    return ""


def _gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(inputs).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
