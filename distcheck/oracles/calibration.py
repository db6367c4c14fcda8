"""Whether the reduction orders that X relies on hold on this machine, with this torch.

Orders are facts about a backend and about DDP, not promises: a release may change them. So
before anything is judged by X, ranks run the bare collective (and a bare DDP model) on vectors
known to all, and compare with the prediction to the bit. Where that fails, X falls back to R,
and the report says so.
"""

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck import backends, seeds
from distcheck.contract import Contract, DDPBuckets
from distcheck.datasets.synthetic import hash24
from distcheck.jobs import Calibration, CalibrationJob
from distcheck.oracles.order_exact import expected_gradients
from distcheck.worlds.child import Reporter
from distcheck.worlds.rendezvous import Rendezvous, join

# Sizes in elements: fewer than ranks, odd, several ring segments in float32.
SIZES = (3, 1003, 700_001)
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
    """A vector [elements] in (-1, 1) that every process can make for every rank."""
    keys = torch.arange(elements) + rank * 1_000_003
    return (hash24(keys).double() / 2**23 - 1).to(dtype)


def _try_all_reduce(job: CalibrationJob) -> str:
    known = backends.all_reduce_sum(job.rendezvous.backend)
    if known is None:
        return f"the reduction order of {job.rendezvous.backend} is not known"
    ranks = range(job.rendezvous.world)
    for dtype in (getattr(torch, name) for name in job.dtypes):
        for elements in SIZES:
            vectors = [known_vector(rank, elements, dtype) for rank in ranks]
            predicted = known(vectors)
            reduced = vectors[job.rendezvous.rank].clone()
            dist.all_reduce(reduced)
            if not torch.equal(reduced, predicted):
                return (
                    f"all_reduce of {elements} elements in {str(dtype).removeprefix('torch.')} "
                    f"on {job.rendezvous.backend} adds in another order than predicted"
                )
    return ""


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 1000), nn.Tanh(), nn.Linear(1000, 16), nn.Linear(16, 4))
    return layers.to(dtype)


def _try_ddp(job: CalibrationJob) -> str:
    for dtype in (getattr(torch, name) for name in job.dtypes):
        reason = _try_ddp_in(dtype, job.rendezvous)
        if reason:
            return reason
    return ""


def _try_ddp_in(dtype: torch.dtype, rendezvous: Rendezvous) -> str:
    contract = Contract(order=DDPBuckets(), scale="multiply-before")
    inputs = [known_vector(r, 8 * 300, dtype).view(8, 300) for r in range(rendezvous.world)]
    alone = _model(dtype)
    ready: list[int] = []
    for index, parameter in enumerate(alone.parameters()):
        parameter.register_hook(lambda _, index=index: ready.append(index))
    shards = [_gradients(alone, part) for part in inputs]
    order = ready[: len(ready) // rendezvous.world]
    together = DistributedDataParallel(_model(dtype))
    for step in range(_STEPS):
        actual = _gradients(together, inputs[rendezvous.rank])
        predicted = expected_gradients(
            contract,
            rendezvous.backend,
            shards,
            weights=[1.0] * rendezvous.world,
            step=step,
            ready_order=order,
        )
        for got, want in zip(actual, predicted, strict=True):
            if want is None or not torch.equal(got, want):
                return f"DDP's buckets at step {step} are not the ones predicted"
    return ""


def _gradients(model: nn.Module, inputs: torch.Tensor) -> Sequence[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(inputs).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
