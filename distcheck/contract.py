"""Interface of strategies and workloads, and the promises of a strategy.

A strategy needs no base class. It is a function, or an object with any of

    wrap(model) -> module        once, before the first step (as DistributedDataParallel does)
    optimizer(build, parameters) -> optimizer    once, in place of build(parameters)
    backward(loss_of, batch, step) -> loss    in place of one forward and backward of the shard
                                 (with `parallel=`, None on a rank that does not have the loss)
    scale_loss(loss, step)       before backward
    sync(model, step)            after backward
    clip(model, max_norm)        in place of torch's clip_grad_norm_, if the loop clips
    close()                      once, after the last step

and a plain function is its `sync`. The declared contract selects the layers that judge the
strategy: with a reduction order its gradients must be bit-identical, without one within the
rounding bound of *some* order. This module imports no torch, so that declaring a contract costs
nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from distcheck.records.case import LossName
from distcheck.records.mesh import Axes, Mesh, promised_axes, promised_mesh

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

CONTRACT_ATTRIBUTE = "__distcheck_contract__"
T = TypeVar("T")


class RankOrder(msgspec.Struct, frozen=True, tag="rank-order"):
    """((g0 + g1) + g2) + ..., one parameter at a time: one rank adds the gathered gradients."""


class BackendAllReduce(msgspec.Struct, frozen=True, tag="all-reduce"):
    """The order of the backend's own all_reduce, called once per parameter."""


class BackendReduce(msgspec.Struct, frozen=True, tag="reduce"):
    """The order of the backend's own reduce to one rank, called once per parameter."""


class RingOrder(msgspec.Struct, frozen=True, tag="ring"):
    """A ring, one parameter at a time: the textbook's reduce-scatter.

    The n elements are split into W chunks of n // W, the first n % W of them one longer. Chunk c is
    (((g[c] + g[c+1]) + g[c+2]) + ...) + g[c+W-1], ranks counted modulo W.
    """


class DDPBuckets(msgspec.Struct, frozen=True, tag="ddp-buckets"):
    """The order of the backend's all_reduce over DistributedDataParallel's buckets.

    Sizes are in MiB: the limit of the first bucket and of the others (`bucket_cap_mb` sets both),
    once DDP has rebuilt its buckets in the order in which gradients became ready. That is at step
    `rebuilt_at`: 1, after the first backward; with `static_graph=True` 2. With
    `find_unused_parameters=True` they are never rebuilt (None): the limits then hold from the first
    step, over the parameters in the order of their registration.
    """

    first_mib: float = 1.0
    cap_mib: float = 25.0
    rebuilt_at: int | None = 1


Scale = Literal["divide-after", "divide-before", "multiply-before"]
Weighting = Literal["gradient", "loss"]
Sync = Literal["after-backward", "during-backward", "out-of-sight"]
OptimizerState = Literal["replicated", "sharded", "cut"]
GradientsOn = Literal["every rank", "owner"]
LossPromise = Literal["tokens"]
Device = Literal["cpu", "cuda"]
Buffers = Literal["local", "rank 0"]
InitialState = Literal["rank 0"]
Wire = Literal["bfloat16", "float16", "float32"]
CellName = Literal[
    "tied_weights", "unused_parameters", "unused_later", "frozen_parameters", "frozen_later",
    "called_twice", "dropout", "reassigned_buffers", "one_element", "zero_size",
    "indivisible_sizes", "bucket_boundaries", "channels_last", "transposed", "mixed_dtypes",
    "complex", "sparse", "ragged_batch", "two_epochs", "accumulation", "clipping", "loss_scaling",
    "adamw", "schedule", "absent_on_some", "zero_on_some", "different_starts", "non_finite",
    "huge_gradients", "denormal_gradients", "over_25_mib", "over_2_24_elements", "complex128",
    "equal_twins", "odd_modules", "integer_buffers", "eval_mode", "resume", "unfrozen_later",
    "one_storage", "kept_gradients", "evaluation",
]  # fmt: skip

Order = RankOrder | BackendAllReduce | BackendReduce | RingOrder | DDPBuckets


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """The promises of a strategy.

    order      the reduction order, or None if none is promised
    scale      how the sum becomes a mean: `divide-after` (sum / W), `divide-before` (each rank's
               gradient / W, then the sum), or `multiply-before` (gradient * (1 / W), then the sum)
    wire       the dtype that gradients are rounded to before they are exchanged, and summed in
               (with the scale, if that comes before); None: the gradient's own
    weighting  the quantity that is multiplied by `Step.weight` if shards are unequal: the rank's
               `gradient` after backward, or its `loss` before. If neither this nor an order is
               promised, the effect of `scale_loss` on the loss is observed and undone
    sync       when gradients are exchanged, and thus where local gradients are visible. If they
               are exchanged `out-of-sight` of hooks on the model's parameters, as by FSDP, the
               gradients that backward leaves on each rank are not checked separately
    buffers    source of BatchNorm's running statistics in a forward pass: `local` to each rank, or
               `rank 0` (broadcast before the first forward of every step). If neither this nor an
               order is promised, both are accepted
    initial_state  `rank 0`: before the first step every rank receives rank 0's parameters and
               buffers. Otherwise ranks must start with equal ones
    micro_batches  number of pieces into which `backward` splits a shard, the first longer by one if
               necessary. Each piece's mean loss is multiplied by its share of the shard's samples
               (and then by the weight); losses and gradients are added in that order
    optimizer_state  `replicated`: every rank holds the state of every parameter; `sharded`: each
               tensor is held completely by exactly one rank; `cut`: each rank holds and updates a
               piece, of the parameter as well
    gradients  `owner`: a parameter's gradient is complete only on the rank whose optimizer updates
               it, as in ZeRO-2; the others' are not compared
    loss       `tokens`: backward gets the sum over the tokens of the rank's shard, and the strategy
               divides the ranks' sum by the tokens of all ranks; each knows its own, `Step.tokens`
    one_group  True: its optimizer has one group, whatever a workload's `groups` are
    backend    the only backend that it supports, if it calls one directly
    device     the only kind of device that it supports: "cpu" or "cuda"
    declines   cells of `--thorough` that it does not support; they are left out, with a note
    parallel   the axes of the mesh in which ranks train one model together, each with its size
               (-1: the rest of the world). Ranks that differ only in axes other than `data` get the
               same samples
    workload   the default workload of its verification: a parallel layout divides the layers of the
               models that it was written for
    """

    order: Order | None = None
    scale: Scale | None = None
    weighting: Weighting | None = None
    sync: Sync = "after-backward"
    buffers: Buffers | None = None
    initial_state: InitialState | None = None
    wire: Wire | None = None
    micro_batches: Annotated[int, msgspec.Meta(ge=1)] = 1
    optimizer_state: OptimizerState = "replicated"
    gradients: GradientsOn = "every rank"
    loss: LossPromise | None = None
    one_group: bool = False
    backend: str | None = None
    device: Device | None = None
    declines: tuple[CellName, ...] = ()
    parallel: Axes = ()
    workload: str | None = None

    def mesh(self, world: int) -> Mesh | None:
        """Return the mesh in a world, None without one. Raises ValueError if it does not fit."""
        return promised_mesh(self.parallel, world)

    def loss_given(self, asked: LossName) -> LossName:
        """Return the loss that backward gets; `asked` is the case's."""
        return self.loss or asked

    @property
    def is_bare(self) -> bool:
        """True if the contract promises nothing about gradients, only its platforms."""
        beside = dict.fromkeys(("backend", "device", "initial_state", "workload"))
        return msgspec.structs.replace(self, declines=(), **beside) == Contract()

    @property
    def observes_loss(self) -> bool:
        """True if the effect of a strategy on its loss is observed, because it promises nothing."""
        return self.order is None and self.weighting is None

    @property
    def takes_any_buffers(self) -> bool:
        """True if a forward pass may start from a rank's own buffers or from rank 0's."""
        return self.order is None and self.buffers is None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step that a strategy synchronizes.

    `samples` is the size of this rank's shard, `total_samples` that of the whole batch; `group` is
    the process group of the world (None: the default group). `ranks_with_data` is the number of
    ranks with a shard, if some have none (None: every rank has one). `tokens` is the number of
    tokens in this rank's loss, possibly 0: equal to `samples` if the workload does not count
    tokens.
    """

    index: int
    rank: int
    world_size: int
    samples: int
    total_samples: int
    group: "ProcessGroup | None" = None
    ranks_with_data: int | None = None
    tokens: int = 0

    @property
    def shards(self) -> int:
        """Number of ranks with a shard: the divisor of a sum of their gradients."""
        return self.world_size if self.ranks_with_data is None else self.ranks_with_data

    @property
    def weight(self) -> float:
        """Factor on a rank's mean gradient that makes a plain mean over the ranks (with data) equal
        the mean over all samples: samples * W / total, 1.0 for equal shards.
        """
        return self.samples * self.shards / self.total_samples


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's shard of one step: inputs [n, *sample shape], labels [n, ...], ids [n] (dataset
    indices), and `total`, the number of samples over all ranks. `real` [n, positions] is False at
    padding, if the workload counts tokens.
    """

    inputs: "torch.Tensor"
    labels: "torch.Tensor"
    ids: "torch.Tensor"
    total: int
    real: "torch.Tensor | None" = None

    @property
    def tokens(self) -> int:
        """Number of tokens in the loss; of samples if the workload does not count tokens."""
        return len(self.ids) if self.real is None else int(self.real.sum())

    def share_of(self, whole: "Batch") -> float:
        """Return the weight of this part's mean loss in that of the whole."""
        return self.tokens / max(1, whole.tokens)

    def part(self, begin: int, end: int) -> "Batch":
        """Return the samples [begin, end); `total` stays that of the step."""
        columns = (self.inputs, self.labels, self.ids)
        inputs, labels, ids = (column[begin:end] for column in columns)
        real = None if self.real is None else self.real[begin:end]
        return Batch(inputs=inputs, labels=labels, ids=ids, total=self.total, real=real)

    def split(self, parts: int) -> "list[Batch]":
        """Return the shard in at most `parts` pieces, none empty, the first longer by one if
        necessary; `total` stays that of the step.
        """
        stretches = self.ids.tensor_split(max(1, min(parts, len(self.ids))))
        ends = accumulate(map(len, stretches), initial=0)
        return [self.part(begin, end) for begin, end in pairwise(ends)]


class LossOf(Protocol):
    """The function that `backward` receives: from a piece of the shard to its mean loss."""

    def __call__(self, batch: Batch) -> "torch.Tensor":
        """Return the loss of the wrapped model on the batch."""
        ...

    def given(self, outputs: "torch.Tensor", batch: Batch) -> "torch.Tensor":
        """Return the loss of given outputs, for the last stage of a pipeline."""
        ...


Build = Callable[..., "torch.optim.Optimizer"]  # parameters, or groups of them, to an optimizer


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Features of a training loop in addition to forward, backward, sync and step.

    accumulate     backward passes in a step, each over a piece of the shard; all but the last
                   within `no_sync()` (or FSDP2's counterpart), if the wrapped model has it
    clip_norm      clips gradients to this L2 norm, after the sync, by torch's clip_grad_norm_
    loss_scale     trains with torch's GradScaler, which begins with this scale (a power of two,
                   so that scaling is exact); a step whose gradients overflow is skipped
    resume_before  the step before which all is rebuilt and loaded from each rank's checkpoint
    keeps_gradients  clears them by zero_grad(set_to_none=False): zeros, in the same tensors
    evaluates      before every step but the first, a forward pass in eval mode, without gradients
    """

    accumulate: Annotated[int, msgspec.Meta(ge=1)] = 1
    clip_norm: float | None = None
    loss_scale: float | None = None
    resume_before: int | None = None
    keeps_gradients: bool = False
    evaluates: bool = False


class Workload(Protocol):
    """The training task: a model, a loss that is a mean over the shard, an optimizer.

    Optional methods and attributes, which have defaults:

    samples()                          the workload's own data, in place of `--data`
    tokens(batch) -> bool [n, positions]: True at positions that the loss is a mean over, False at
                                       padding. The loss of a batch without any must be 0
    sampler(size, world, rank, seed, epoch) -> indices of this rank for one epoch, in order;
                                       by default torch's DistributedSampler
    before_step(model, step)           changes that a script makes to its model before a step's
                                       forward, such as freezing a layer; a function of the step
    groups(parameters)                 parameter groups for `optimizer`, as a script makes them:
                                       dicts with "params" and settings of their own
    schedule(optimizer, step)          changes that a script makes to its optimizer before a step,
                                       such as the rates in `param_groups`; a function of the step
    hand_over(model, rank)             changes that a script's rank makes to its model before it is
                                       passed to the strategy; rank 0's result counts
    training                           a `Training`: further features of the loop
    must_happen                        events of `distcheck.records.expected_events`: a run without
                                       one of them is unknown
    own_dtypes                         True: `model` keeps the dtypes that it was built in
    """

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> "torch.nn.Module":
        """Return a model built from the current RNG state, in the default dtype."""
        ...

    def loss(self, model: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """Return the mean loss over the shard: a scalar."""
        ...

    def optimizer(self, parameters: "Iterable[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """Return the optimizer of parameters or of groups of them."""
        ...


class Samples(Protocol):
    """A data set that can be read by index, from any process, in any order."""

    shape: tuple[int, ...]
    classes: int

    def size(self, *, train: bool) -> int:
        """Return the number of samples in the training or the test split."""
        ...

    def read(
        self, ids: "torch.Tensor", *, train: bool, dtype: "torch.dtype"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return (inputs [n, *shape] in `dtype`, labels [n] int64) for `ids` [n] int64."""
        ...


def strategy(
    *,
    order: Order | None = None,
    scale: Scale | None = None,
    weighting: Weighting | None = None,
    sync: Sync = "after-backward",
    buffers: Buffers | None = None,
    initial_state: InitialState | None = None,
    wire: Wire | None = None,
    micro_batches: int = 1,
    optimizer_state: OptimizerState = "replicated",
    gradients: GradientsOn = "every rank",
    loss: LossPromise | None = None,
    one_group: bool = False,
    backend: str | None = None,
    device: Device | None = None,
    declines: tuple[CellName, ...] = (),
    parallel: Mapping[str, int] | None = None,
    workload: str | None = None,
) -> Callable[[T], T]:
    """Declare the contract of the function or class below it; `Contract` documents the arguments.

    Raises ValueError for an invalid promise.
    """
    if parallel is not None:  # no hook sees a full gradient, and no rank has all of it
        sync, optimizer_state = "out-of-sight", "cut"
    contract = Contract(
        order=order, scale=scale, weighting=weighting, sync=sync, buffers=buffers,
        initial_state=initial_state, wire=wire, micro_batches=micro_batches,
        optimizer_state=optimizer_state, gradients=gradients, loss=loss, one_group=one_group,
        backend=backend, device=device, declines=declines, parallel=promised_axes(parallel),
        workload=workload,
    )  # fmt: skip
    try:
        msgspec.convert(msgspec.to_builtins(contract), Contract)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"@strategy: {error}; order is RankOrder(), BackendAllReduce(), BackendReduce(), "
            'RingOrder(), DDPBuckets() or None; scale "divide-after", "divide-before" or '
            '"multiply-before"; weighting "gradient" or "loss"; sync "after-backward", '
            '"during-backward" or "out-of-sight"; buffers "local" or "rank 0"; initial_state '
            '"rank 0" or None; wire "bfloat16", "float16", "float32" or None; micro_batches a '
            'number from 1; optimizer_state "replicated", "sharded" or "cut"; gradients "every '
            'rank" or "owner"; loss "tokens" or None; one_group True or False; backend a name or '
            'None; device "cpu", "cuda" or None; declines names of cells (distcheck list); '
            "parallel a mapping of axes to sizes; workload a name or None"
        ) from None
    if loss and (order, weighting, micro_batches, parallel) != (None, None, 1, None):
        raise ValueError(
            '@strategy: loss="tokens" says how ranks are weighted; remove order=, weighting=, '
            "micro_batches= and parallel="
        )

    def declare(target: T) -> T:
        setattr(target, CONTRACT_ATTRIBUTE, contract)
        return target

    return declare


def contract_of(target: Any) -> Contract:
    """Return the contract declared on a strategy; an empty one if there is none."""
    declared = getattr(target, CONTRACT_ATTRIBUTE, None)
    return declared if isinstance(declared, Contract) else Contract()
