"""What a strategy and a workload offer, and what a strategy promises.

A strategy needs no base class. It is a function, or an object with any of

    wrap(model) -> module        once, before the first step (as DistributedDataParallel does)
    scale_loss(loss, step)       before backward
    sync(model, step)            after backward
    close()                      once, after the last step

and a plain function is its `sync`. The promise beside it decides which layers judge it: with a
reduction order its gradients are owed to the bit, without one within the rounding bound of
*some* order. This module imports no torch, so that a strategy file costs nothing to declare.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

CONTRACT_ATTRIBUTE = "__distcheck_contract__"
T = TypeVar("T")


class RankOrder(msgspec.Struct, frozen=True, tag="rank-order"):
    """((g0 + g1) + g2) + ..., one parameter at a time: one rank adds up what it gathered."""


class BackendAllReduce(msgspec.Struct, frozen=True, tag="all-reduce"):
    """The order of the backend's own all_reduce, called once per parameter."""


class DDPBuckets(msgspec.Struct, frozen=True, tag="ddp-buckets"):
    """The order of the backend's all_reduce over DistributedDataParallel's buckets.

    Sizes are in MiB: the first bucket's limit and that of the others, once DDP has rebuilt its
    buckets in the order in which gradients became ready (after the first backward).
    """

    first_mib: float = 1.0
    cap_mib: float = 25.0


Order = RankOrder | BackendAllReduce | DDPBuckets


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy promises.

    order      the reduction order, or None where none is promised
    scale      how the sum becomes a mean: `divide-after` (sum / W), or `multiply-before`
               (each rank's gradient * (1 / W), then the sum)
    weighting  what a strategy multiplies by `Step.weight` when shards are unequal: the rank's
               `gradient` after backward, or its `loss` before. Where neither this nor an order
               is promised, what `scale_loss` does to the loss is observed and undone
    sync       when gradients are exchanged; says where local gradients can be seen
    buffers    where a forward pass finds BatchNorm's running statistics: `local` to each rank,
               or `rank 0` (broadcast before every forward). Where neither this nor an order is
               promised, either will do
    """

    order: Order | None = None
    scale: Literal["divide-after", "multiply-before"] | None = None
    weighting: Literal["gradient", "loss"] | None = None
    sync: Literal["after-backward", "during-backward"] = "after-backward"
    buffers: Literal["local", "rank 0"] | None = None

    @property
    def observes_loss(self) -> bool:
        """Whether what a strategy does to its loss is observed, because it promises nothing."""
        return self.order is None and self.weighting is None

    @property
    def takes_any_buffers(self) -> bool:
        """Whether a forward pass may start from a rank's own buffers or from rank 0's."""
        return self.order is None and self.buffers is None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a strategy may know about the step it synchronises.

    `samples` is the size of this rank's shard, `total_samples` that of the whole batch; `group`
    is the process group of the world (None: the default group).
    """

    index: int
    rank: int
    world_size: int
    samples: int
    total_samples: int
    group: "ProcessGroup | None" = None

    @property
    def weight(self) -> float:
        """What a rank's mean gradient must be multiplied by so that a plain mean over the ranks
        equals the mean over all samples: samples * W / total. It is 1.0 for equal shards.
        """
        return self.samples * self.world_size / self.total_samples


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's shard of one step: inputs [n, *sample shape], labels [n], ids [n] (dataset
    indices), and `total`, the number of samples over all ranks.
    """

    inputs: "torch.Tensor"
    labels: "torch.Tensor"
    ids: "torch.Tensor"
    total: int


class Workload(Protocol):
    """What is trained: a model, a loss that is a mean over the shard, an optimizer.

    Two further methods are looked for and have defaults:

    samples()                          data of the workload's own, in place of `--data`
    sampler(size, world, rank, seed, epoch) -> indices of this rank for one epoch, in order;
                                       by default torch's DistributedSampler
    """

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> "torch.nn.Module":
        """Builds the model from the current RNG state, in the default dtype."""
        ...

    def loss(self, model: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """The mean loss over the shard: a scalar."""
        ...

    def optimizer(self, parameters: "Iterable[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """Builds the optimizer."""
        ...


class Samples(Protocol):
    """A data set that can be read by index, from any process, in any order."""

    shape: tuple[int, ...]
    classes: int

    def size(self, *, train: bool) -> int:
        """How many samples the training or the test split has."""
        ...

    def read(
        self, ids: "torch.Tensor", *, train: bool, dtype: "torch.dtype"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """(inputs [n, *shape] in `dtype`, labels [n] int64) for `ids` [n] int64."""
        ...


def strategy(
    *,
    order: Order | None = None,
    scale: Literal["divide-after", "multiply-before"] | None = None,
    weighting: Literal["gradient", "loss"] | None = None,
    sync: Literal["after-backward", "during-backward"] = "after-backward",
    buffers: Literal["local", "rank 0"] | None = None,
) -> Callable[[T], T]:
    """Declares the contract of the function or class below it; see `Contract` for the words.

    Raises ValueError for a promise that is none of them.
    """
    contract = Contract(order=order, scale=scale, weighting=weighting, sync=sync, buffers=buffers)
    try:
        msgspec.convert(msgspec.to_builtins(contract), Contract)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"@strategy: {error}; order is RankOrder(), BackendAllReduce(), DDPBuckets() or None; "
            'scale "divide-after" or "multiply-before"; weighting "gradient" or "loss"; sync '
            '"after-backward" or "during-backward"; buffers "local" or "rank 0"'
        ) from None

    def declare(target: T) -> T:
        setattr(target, CONTRACT_ATTRIBUTE, contract)
        return target

    return declare


def contract_of(target: Any) -> Contract:
    """The contract declared on a strategy; the empty promise when there is none."""
    declared = getattr(target, CONTRACT_ATTRIBUTE, None)
    return declared if isinstance(declared, Contract) else Contract()
