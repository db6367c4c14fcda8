"""The sum is right, the scale is not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import BackendAllReduce, Batch, DDPBuckets, LossOf, Step, strategy

from . import mutant


@mutant(caught="gradients rounding, gradients full batch float32")
def missing_division(model: nn.Module) -> None:
    """SUM without a division: W times too large; the loss curve looks fine."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@mutant(caught="gradients rounding, gradients full batch float32")
def double_division(model: nn.Module, step: Step) -> None:
    """Divides before and after."""
    for parameter in model.parameters():
        parameter.grad /= step.world_size
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught="gradients rounding, gradients full batch float32", world=3)
def wrong_divisor(model: nn.Module, step: Step) -> None:
    """Divides by another group's size (DeepSpeed #5555)."""
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


@mutant(caught="gradients rounding")
def scale_off_by_two_millionths(model: nn.Module, step: Step) -> None:
    """So small that only the rounding bound sees it."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad *= (1 + 2e-6) / step.world_size


@mutant(caught="gradients bitwise", world=3)
@strategy(order=BackendAllReduce(), scale="divide-after")
def multiplies_by_the_reciprocal(model: nn.Module, step: Step) -> None:
    """Promises a division and multiplies by 1/3: within any bound, not to the bit."""
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad *= 1 / step.world_size


@mutant(caught="gradients rounding, gradients full batch float32", world=3)
def mean_of_means(model: nn.Module, step: Step) -> None:
    """Shards of 86, 85 and 85 samples count alike (pytorch #37359, transformers #608)."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(
    caught=(
        "gradients bitwise, gradients rounding, gradients full batch float32, local gradients "
        "bitwise"
    ),
    world=3,
)
@strategy(
    order=DDPBuckets(), scale="multiply-before", weighting="loss", sync="during-backward",
    buffers="rank 0",
)  # fmt: skip
class DDPWithoutWeights:
    """DDP as everybody writes it, on a batch that does not divide by the world."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


@mutant(caught="gradients rounding, gradients full batch float32")
def one_parameter_twice(model: nn.Module, step: Step) -> None:
    """One parameter group is scaled twice (DeepSpeed #4957)."""
    for index, parameter in enumerate(model.parameters()):
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size
        if index == 2:
            parameter.grad /= step.world_size


@mutant(caught="gradients exact, parameters exact", workload="exact")
def forgets_scalars(model: nn.Module, step: Step) -> None:
    """A parameter without dimensions is summed and never divided; only workload `exact` has one."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if parameter.dim() > 0:
            parameter.grad /= step.world_size


@mutant(
    caught="local gradients exact, gradients exact, parameters exact",
    workload="exact",
    world=2,
)
def clips_large_norms_first(model: nn.Module, step: Step) -> None:
    """Every rank clips by its own norm, which is above 1 in workload `exact` alone. The results are
    no integers, and so are local gradients from the next step on.
    """
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught="gradients rounding, gradients full batch float32")
def half_precision_wire(model: nn.Module, step: Step) -> None:
    """Compressed to bfloat16 on the way, without saying so."""
    for parameter in model.parameters():
        small = parameter.grad.to(torch.bfloat16)
        dist.all_reduce(small)
        parameter.grad.copy_(small / step.world_size)


@mutant(caught="gradients rounding", workload="mlp")
@strategy(wire="float16")
def shorter_wire_than_promised(model: nn.Module, step: Step) -> None:
    """Promises float16's 11 bits and sends bfloat16's 8."""
    half_precision_wire(model, step)


@mutant(caught="gradients rounding, gradients full batch float32")
@strategy(wire="bfloat16")
def drops_a_rank_on_a_short_wire(model: nn.Module, step: Step) -> None:
    """The widest bound there is, and still a lost rank is far outside."""
    for parameter in model.parameters():
        small = parameter.grad.to(torch.bfloat16)
        gathered = [torch.empty_like(small) for _ in range(step.world_size)]
        dist.all_gather(gathered, small)
        parameter.grad.copy_(torch.stack(gathered[:-1]).mean(0))


@mutant(caught="gradients rounding, gradients full batch float32", workload="mlp")
@strategy(wire="float16")
def one_percent_on_a_short_wire(model: nn.Module, step: Step) -> None:
    """A scale that is off by a hundredth is more than float16 may lose."""
    for parameter in model.parameters():
        small = parameter.grad.to(torch.float16)
        dist.all_reduce(small)
        parameter.grad.copy_(small / step.world_size * 1.01)


@mutant(caught="gradients bitwise")
@strategy(order=BackendAllReduce(), scale="divide-after", wire="bfloat16")
def rounds_after_the_sum(model: nn.Module, step: Step) -> None:
    """Promises to add up in bfloat16, and rounds only the sum: more exact than it said."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.copy_(parameter.grad.to(torch.bfloat16) / step.world_size)


@mutant(caught="gradients bitwise", world=3)
@strategy(order=BackendAllReduce(), scale="divide-before")
def divides_after_where_it_promised_before(model: nn.Module, step: Step) -> None:
    """Dividing three times before rounds three times, dividing once after once."""
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(
    caught=(
        "local gradients bitwise, gradients bitwise, gradients rounding, gradients full batch "
        "float32"
    ),
    world=3,
)
@strategy(
    order=DDPBuckets(), scale="multiply-before", weighting="loss", sync="during-backward",
    buffers="rank 0", micro_batches=2,
)  # fmt: skip
class MicroBatchesCountAlike:
    """Micro-batches of 43 and 42 samples, each counted as one half of the shard."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.wrapped = DistributedDataParallel(model)
        return self.wrapped

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        first, second = batch.split(2)
        with self.wrapped.no_sync():
            one = loss_of(first)
            (one / 2 * step.weight).backward()
        two = loss_of(second)
        (two / 2 * step.weight).backward()
        shares = [len(part.ids) / step.samples for part in (first, second)]
        return one.detach() * shares[0] + two.detach() * shares[1]


@mutant(caught="gradients full batch float64", workload="mlp", dtype=None)
def a_billionth_too_large(model: nn.Module, step: Step) -> None:
    """Far below the rounding of float32: only the float64 pass sees it."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.mul_((1 + 1e-9) / step.world_size)


@mutant(caught="gradients rounding, gradients full batch float64", workload="mlp", dtype="float64")
def single_precision_wire(model: nn.Module, step: Step) -> None:
    """Exact for float32, lossy for float64: a defect where float64 was asked for."""
    for parameter in model.parameters():
        wire = parameter.grad.float()
        dist.all_reduce(wire)
        parameter.grad.copy_(wire / step.world_size)


@mutant(caught="local gradients bitwise")
class DoubledOnTheWay:
    """Gradients are doubled inside backward and halved after: right in the end, not on the way."""

    def wrap(self, model: nn.Module) -> nn.Module:
        # The same values, with twice the derivative.
        model.register_forward_hook(lambda module, inputs, output: output * 2 - output.detach())
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2 * step.world_size
