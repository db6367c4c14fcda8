"""torch's DistributedDataParallel with one of the comm hooks that torch brings, one class each.

A hook takes a bucket over from DDP: it divides, exchanges and returns it. Those that compress
lose precision on purpose, and their contract says how much may be lost: the wire's dtype.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import DDPBuckets, strategy

from .ddp import CHANGING, DDP

_ddp = partial(
    strategy,
    scale="divide-before",
    weighting="loss",
    sync="during-backward",
    buffers="rank 0",
    initial_state="rank 0",
    declines=CHANGING,
)


@_ddp(order=DDPBuckets())
class AllReduce(DDP):
    """DDP with torch's allreduce_hook: what DDP does by itself, with a true division."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The hook's state is the process group; None is the default one."""
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        return wrapped


@_ddp(order=DDPBuckets(), wire="float16")
class Float16(DDP):
    """DDP with torch's fp16_compress_hook: half the traffic, 11 bits of every gradient."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Gradients beyond 65504 become infinite: float16 reaches no further."""
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped


@_ddp(order=DDPBuckets(), wire="bfloat16")
class BFloat16(DDP):
    """DDP with torch's bf16_compress_hook: float32's range, 8 bits of every gradient."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Nothing overflows that did not before, and far more is rounded away."""
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, self._compress)
        return wrapped

    @staticmethod
    def _compress(
        group: dist.ProcessGroup | None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """DDP takes the hook under its own name with NCCL only; other backends can do it too."""
        return default_hooks.bf16_compress_hook(group, bucket)  # type: ignore[arg-type]
