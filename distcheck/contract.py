"""What a strategy and a workload offer, and what a strategy promises.

A strategy needs no base class. It is a function, or an object with any of

    wrap(model) -> module        once, before the first step (as DistributedDataParallel does)
    optimizer(build, parameters) -> optimizer    once, in place of build(parameters)
    backward(loss_of, batch, step) -> loss    in place of one forward and backward of the shard
                                 (with `parallel=`, None on a rank that does not have the loss)
    scale_loss(loss, step)       before backward
    sync(model, step)            after backward
    clip(model, max_norm)        in place of torch's clip_grad_norm_, where the loop clips
    close()                      once, after the last step

and a plain function is its `sync`. The promise beside it decides which layers judge it: with a
reduction order its gradients must be bit-identical, without one within the rounding bound of
*some* order. This module imports no torch, so that a strategy file costs nothing to declare.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from distcheck.records.case import LossName
from distcheck.records.mesh import Axes, Mesh, axes_of, mesh_in

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

CONTRACT_ATTRIBUTE = "__distcheck_contract__"
T = TypeVar("T")


class RankOrder(msgspec.Struct, frozen=True, tag="rank-order"):
    """((g0 + g1) + g2) + ..., one parameter at a time: one rank adds up what it gathered."""


class BackendAllReduce(msgspec.Struct, frozen=True, tag="all-reduce"):
    """The order of the backend's own all_reduce, called once per parameter."""


class BackendReduce(msgspec.Struct, frozen=True, tag="reduce"):
    """The order of the backend's own reduce to one rank, called once per parameter."""


class RingOrder(msgspec.Struct, frozen=True, tag="ring"):
    """A ring, one parameter at a time: the textbook's reduce-scatter.

    The n elements are cut into W chunks of n // W, the first n % W of them one longer. Chunk c
    is (((g[c] + g[c+1]) + g[c+2]) + ...) + g[c+W-1], ranks counted modulo W.
    """


class DDPBuckets(msgspec.Struct, frozen=True, tag="ddp-buckets"):
    """The order of the backend's all_reduce over DistributedDataParallel's buckets.

    Sizes are in MiB: the first bucket's limit and that of the others (`bucket_cap_mb` sets
    both), once DDP has rebuilt its buckets in the order in which gradients became ready. That is
    at step `rebuilt_at`: 1, after the first backward; with `static_graph=True` 2. With
    `find_unused_parameters=True` they are never rebuilt (None): the limits then hold from the
    first step, over the parameters in the order of their registration.
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
    """What a strategy promises.

    order      the reduction order, or None where none is promised
    scale      how the sum becomes a mean: `divide-after` (sum / W), `divide-before` (each rank's
               gradient / W, then the sum), or `multiply-before` (gradient * (1 / W), then the sum)
    wire       the dtype that gradients are rounded to before they are exchanged, and summed in
               (with the scale, if that comes before); None: the gradient's own
    weighting  what a strategy multiplies by `Step.weight` when shards are unequal: the rank's
               `gradient` after backward, or its `loss` before. Where neither this nor an order
               is promised, what `scale_loss` does to the loss is observed and undone
    sync       when gradients are exchanged; says where local gradients can be seen. Where they
               are exchanged `out-of-sight` of hooks on the model's parameters, as FSDP does, what
               backward left on each rank is not checked by itself
    buffers    where a forward pass finds BatchNorm's running statistics: `local` to each rank,
               or `rank 0` (broadcast before the first forward of every step). Where neither this
               nor an order is promised, either will do
    initial_state  `rank 0`: before the first step every rank is given rank 0's parameters and
               buffers. Where that is not promised, ranks have to begin alike
    micro_batches  into how many stretches `backward` cuts a shard, the first longer by one where
               need be. Each one's mean loss is multiplied by its share of the shard's samples
               (and then by the weight); losses and gradients are added up in that order
    optimizer_state  whether every rank holds the state of every parameter, or each tensor is
               `sharded` (held whole by exactly one rank) or `cut` (each rank holds and updates a
               piece, of the parameter as well)
    gradients  `owner`: a parameter's gradient is complete on the one rank only whose optimizer
               updates it, as in ZeRO-2; the others' are not compared
    loss       `tokens`: backward gets the sum over the tokens of the rank's shard, and the strategy
               divides the ranks' sum by the tokens of all ranks; each knows its own, `Step.tokens`
    one_group  that its optimizer has one group, whatever a workload's `groups` are
    backend    the only backend it works on, where it speaks to that directly
    device     the only kind of device it works on: "cpu" or "cuda"
    declines   cells of `--thorough` that it is not made for; they are left out, with a note
    parallel   the axes of the mesh in which ranks train one model together, each with its size
               (-1: what the others leave of the world). Ranks that differ in another axis than
               `data` are given the same samples
    workload   what it is verified with where no workload is asked for: a layout divides the layers
               of the models that it was written for
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
        """The mesh in a world, None where none is promised. Raises ValueError where it does not
        fit.
        """
        return mesh_in(self.parallel, world)

    def loss_given(self, asked: LossName) -> LossName:
        """What backward gets, where `asked` is what the case says of it."""
        return self.loss or asked

    @property
    def is_bare(self) -> bool:
        """Whether it promises nothing about gradients: only where and on what it works, if that."""
        beside = dict.fromkeys(("backend", "device", "initial_state", "workload"))
        return msgspec.structs.replace(self, declines=(), **beside) == Contract()

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
    """What a strategy may know about the step it synchronizes.

    `samples` is the size of this rank's shard, `total_samples` that of the whole batch; `group`
    is the process group of the world (None: the default group). `ranks_with_data` is how many
    ranks have a shard, where it was said that some have none (None: every rank has one). `tokens`
    is what this rank's loss is over, and may be 0: `samples` where the workload counts none.
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
        """How many ranks have a shard: what a sum of their gradients is to be divided by."""
        return self.world_size if self.ranks_with_data is None else self.ranks_with_data

    @property
    def weight(self) -> float:
        """What a rank's mean gradient must be multiplied by so that a plain mean over the ranks
        (with data) equals the mean over all samples: samples * W / total. It is 1.0 for equal
        shards.
        """
        return self.samples * self.shards / self.total_samples


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's shard of one step: inputs [n, *sample shape], labels [n, ...], ids [n] (dataset
    indices), and `total`, the number of samples over all ranks. `real` [n, positions] is False at
    padding, where the workload counts tokens.
    """

    inputs: "torch.Tensor"
    labels: "torch.Tensor"
    ids: "torch.Tensor"
    total: int
    real: "torch.Tensor | None" = None

    @property
    def tokens(self) -> int:
        """How many tokens the loss is over; samples where the workload counts none."""
        return len(self.ids) if self.real is None else int(self.real.sum())

    def share_of(self, whole: "Batch") -> float:
        """What the mean loss of this part counts for in that of the whole."""
        return self.tokens / max(1, whole.tokens)

    def part(self, begin: int, end: int) -> "Batch":
        """A stretch of the samples; `total` stays that of the step."""
        columns = (self.inputs, self.labels, self.ids)
        inputs, labels, ids = (column[begin:end] for column in columns)
        real = None if self.real is None else self.real[begin:end]
        return Batch(inputs=inputs, labels=labels, ids=ids, total=self.total, real=real)

    def split(self, parts: int) -> "list[Batch]":
        """The shard in at most `parts` stretches, none empty, the first longer by one if need be;
        `total` stays that of the step.
        """
        stretches = self.ids.tensor_split(max(1, min(parts, len(self.ids))))
        ends = accumulate(map(len, stretches), initial=0)
        return [self.part(begin, end) for begin, end in pairwise(ends)]


class LossOf(Protocol):
    """What a strategy's `backward` is given: a stretch of the shard to its mean loss."""

    def __call__(self, batch: Batch) -> "torch.Tensor":
        """The loss of what the wrapped model makes of the batch."""
        ...

    def given(self, outputs: "torch.Tensor", batch: Batch) -> "torch.Tensor":
        """The loss of outputs that were computed already, as the last stage of a pipeline does."""
        ...


Build = Callable[..., "torch.optim.Optimizer"]  # parameters, or groups of them, to an optimizer


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What a training loop does besides forward, backward, sync and step.

    accumulate     backward passes in a step, each over a stretch of the shard; all but the last
                   within `no_sync()` (or FSDP2's counterpart), where the wrapped model has it
    clip_norm      clips gradients to this L2 norm, after the sync, by torch's clip_grad_norm_
    loss_scale     trains with torch's GradScaler, which begins with this scale (a power of two,
                   so that it rounds nothing); a step whose gradients overflow is skipped
    resume_before  the step before which all is built anew and filled from each rank's checkpoint
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
    """What is trained: a model, a loss that is a mean over the shard, an optimizer.

    Further methods and attributes are looked for and have defaults:

    samples()                          data of the workload's own, in place of `--data`
    tokens(batch) -> bool [n, positions]: which positions the loss is a mean over, and which are
                                       padding. The loss of a batch without any has to be 0
    sampler(size, world, rank, seed, epoch) -> indices of this rank for one epoch, in order;
                                       by default torch's DistributedSampler
    before_step(model, step)           what a script does to its model before a step's forward
                                       pass, such as freezing a layer; a function of the step
    groups(parameters)                 parameter groups for `optimizer`, as a script makes them:
                                       dicts with "params" and settings of their own
    schedule(optimizer, step)          what a script does to its optimizer before a step, such as
                                       setting the rates in `param_groups`; a function of the step
    hand_over(model, rank)             what a script's rank does to its model before the strategy
                                       is given it; what counts is what rank 0 has then
    training                           a `Training`: what the loop does besides
    must_happen                        events of `distcheck.records.expected_events`: a run in
                                       which one of them did not happen is unknown
    own_dtypes                         True: `model` is left in the dtypes that it was built in
    """

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> "torch.nn.Module":
        """Builds the model from the current RNG state, in the default dtype."""
        ...

    def loss(self, model: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """The mean loss over the shard: a scalar."""
        ...

    def optimizer(self, parameters: "Iterable[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """Builds the optimizer, of parameters or of groups of them."""
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
    """Declares the contract of the function or class below it; see `Contract` for the words.

    Raises ValueError for a promise that is not one of them.
    """
    if parallel is not None:  # no hook sees a gradient of the whole model, nor one rank all of it
        sync, optimizer_state = "out-of-sight", "cut"
    contract = Contract(
        order=order, scale=scale, weighting=weighting, sync=sync, buffers=buffers,
        initial_state=initial_state, wire=wire, micro_batches=micro_batches,
        optimizer_state=optimizer_state, gradients=gradients, loss=loss, one_group=one_group,
        backend=backend, device=device, declines=declines, parallel=axes_of(parallel),
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
    """The contract declared on a strategy; the empty promise when there is none."""
    declared = getattr(target, CONTRACT_ATTRIBUTE, None)
    return declared if isinstance(declared, Contract) else Contract()
