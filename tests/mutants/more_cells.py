"""Right on simple trainings, wrong where ranks, numbers, sizes or modules are out of the ordinary:
each in the cell that makes it visible.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distcheck.contract import Build, Step, strategy

from . import mutant
from .small import average

WRONG, APART = (
    "gradients rounding, gradients full batch float32",
    "gradients rounding, gradients full batch float32, agreement",
)
MIB_25 = 25 << 20


def _average(gradient: torch.Tensor, step: Step) -> None:
    gradient.mul_(step.weight)
    dist.all_reduce(gradient)
    gradient.div_(step.world_size)


@mutant(caught=APART, workload="schedule", world=2, steps=2)
class RestsAtRateZero:
    """With a learning rate of 0 a step changes nothing, it says: but momentum it does."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self.made = build(parameters)
        return self.made

    def sync(self, model: nn.Module, step: Step) -> None:
        if any(group["lr"] > 0 for group in self.made.param_groups):
            average(model, step)


@mutant(caught=f"{APART}, loss full batch float32", workload="absent_on_some", world=3, steps=3)
def asks_rank_0_what_there_is(model: nn.Module, step: Step) -> None:
    """So that all ranks call the same collectives: what rank 0 lacks is never exchanged."""
    parameters = list(model.parameters())
    there = torch.tensor([parameter.grad is not None for parameter in parameters])
    dist.broadcast(there, 0)
    for parameter, is_there in zip(parameters, there.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _average(parameter.grad, step)


@mutant(caught=f"{APART}, loss full batch float32", workload="absent_on_some", world=2, steps=3)
class BucketThatIsNeverFull:
    """It is sent when every parameter's hook has run, and a layer that is not used runs none."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.parameters, self.ready = list(model.parameters()), 0
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.count)
        return model

    def count(self, _: torch.Tensor) -> None:
        self.ready += 1
        if self.ready == len(self.parameters):
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def sync(self, model: nn.Module) -> None:
        self.ready = 0


@mutant(caught=WRONG, workload="zero_on_some", world=3, steps=1)
def counts_who_has_something(model: nn.Module, step: Step) -> None:
    """The mean over the ranks whose gradient is not zero."""
    for parameter in model.parameters():
        ranks = parameter.grad.any().float()
        parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        dist.all_reduce(ranks)
        parameter.grad.div_(ranks.clamp(min=1))


@mutant(
    caught="initial state, gradients full batch float32, loss full batch float32, agreement",
    workload="different_starts", world=2, steps=1,
)  # fmt: skip
@strategy(initial_state="rank 0")
class SendsWeightsAndForgetsBiases:
    """What has one dimension is small, and is not sent."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() > 1:
                dist.broadcast(tensor.detach(), 0)
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught=WRONG, workload="non_finite", world=2, steps=1)
def takes_no_number_for_zero(model: nn.Module, step: Step) -> None:
    """A NaN would spread to every rank; it goes on as if there had been none."""
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=-float("inf"))
    average(model, step)


@mutant(caught=WRONG, workload="huge_gradients", world=2, steps=1)
def drops_what_has_no_finite_norm(model: nn.Module, step: Step) -> None:
    """A norm that overflows is taken for a gradient that does."""
    for parameter in model.parameters():
        if not parameter.grad.square().sum().isfinite():
            parameter.grad.zero_()
    average(model, step)


@mutant(caught=WRONG, workload="denormal_gradients", world=2, steps=1)
def flushes_what_is_denormal(model: nn.Module, step: Step) -> None:
    """What is below the smallest normal number counts as zero."""
    for parameter in model.parameters():
        least = torch.finfo(parameter.grad.dtype).tiny
        parameter.grad.masked_fill_(parameter.grad.abs() < least, 0.0)
    average(model, step)


@mutant(caught=APART, workload="over_25_mib", world=2, steps=1, seldom=True)
def sends_25_mib_at_most(model: nn.Module, step: Step) -> None:
    """One buffer of 25 MiB, filled once for a tensor: what is beyond it stays as it is."""
    for parameter in model.parameters():
        flat = parameter.grad.view(-1)
        _average(flat[: MIB_25 // parameter.element_size()], step)


@mutant(caught=APART, workload="over_2_24_elements", world=2, steps=1, seldom=True)
def sends_its_sizes_in_single_precision(model: nn.Module, step: Step) -> None:
    """The number of elements goes through float32, which holds no odd number beyond 2^24."""
    for parameter in model.parameters():
        size = torch.tensor(float(parameter.numel()), dtype=torch.float32)
        dist.broadcast(size, 0)
        _average(parameter.grad.view(-1)[: int(size)], step)


@mutant(caught="gradients rounding", workload="complex128", world=2, steps=1, seldom=True)
def every_complex_is_complex64(model: nn.Module, step: Step) -> None:
    """It asks whether numbers are complex, and not how long."""
    for parameter in model.parameters():
        wire = parameter.grad.to(torch.complex64) if parameter.is_complex() else parameter.grad
        _average(wire, step)
        parameter.grad.copy_(wire)


@mutant(caught=WRONG, workload="equal_twins", world=2, steps=1)
def takes_equal_for_tied(model: nn.Module, step: Step) -> None:
    """Parameters that hold the same numbers are taken for one parameter, exchanged once."""
    known: list[nn.Parameter] = []
    for parameter in model.parameters():
        first = next((p for p in known if torch.equal(p, parameter)), None)
        if first is not None:
            parameter.grad.copy_(first.grad)
            continue
        known.append(parameter)
        _average(parameter.grad, step)


@mutant(caught=APART, workload="odd_modules", world=2, steps=1)
def knows_one_class_of_parameters(model: nn.Module, step: Step) -> None:
    """`type(p) is nn.Parameter` where isinstance was meant."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            _average(parameter.grad, step)


@mutant(caught="buffers bitwise", workload="integer_buffers", world=2, steps=1)
@strategy(weighting="gradient", buffers="rank 0")
class SendsBuffersAsFloats:
    """All buffers in one message of float32, which counts to 2^24."""

    def wrap(self, model: nn.Module) -> nn.Module:
        def broadcast(*_: object) -> None:
            buffers = list(model.buffers())
            flat = torch.cat([buffer.float().flatten() for buffer in buffers])
            dist.broadcast(flat, 0)
            sizes = [buffer.numel() for buffer in buffers]
            for buffer, part in zip(buffers, flat.split(sizes), strict=True):
                buffer.copy_(part.view_as(buffer))

        model.register_forward_pre_hook(broadcast)
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught=f"{APART}, loss full batch float32", workload="eval_mode", world=2, steps=3)
def exchanges_in_training_mode(model: nn.Module, step: Step) -> None:
    """Nothing is exchanged while validating: by the model's mode, not by what is done with it."""
    if model.training:
        average(model, step)


@mutant(
    caught=f"local gradients bitwise, {WRONG}, loss bitwise, loss full batch float32, "
    "buffers bitwise",
    workload=".workloads:Normalized",
    world=2,
    steps=2,
    step=1,
)
def leaves_eval_mode_on(model: nn.Module, step: Step) -> None:
    """It validates after the exchange, and never calls train()."""
    average(model, step)
    model.eval()


@mutant(
    caught=f"{APART}, loss full batch float32", workload="unfrozen_later", world=2, steps=4, step=2
)
class HooksWhatTrainsAtFirst:
    """Hooks on the parameters that need one when it is made, as DDP's (Lightning #20340)."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.exchange)
        return model

    def exchange(self, parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@mutant(caught=f"{APART}, loss full batch float32", workload="one_storage", world=2)
def takes_one_storage_for_tied(model: nn.Module, step: Step) -> None:
    """Weights that are tied share their memory; what shares its memory is not always tied."""
    seen = set()
    for parameter in model.parameters():
        place = parameter.untyped_storage().data_ptr()
        if place not in seen:
            _average(parameter.grad, step)
        seen.add(place)


@mutant(caught=f"{APART}, loss full batch float32", workload="kept_gradients", world=2, step=1)
class TakesAGradientForAccumulation:
    """Where there is a gradient before backward, it was the first pass that exchanged."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.first: dict[nn.Parameter, bool] = {}
        for parameter in model.parameters():
            parameter.register_hook(partial(self.look, parameter))
        return model

    def look(self, parameter: nn.Parameter, _: torch.Tensor) -> None:
        self.first[parameter] = parameter.grad is None

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            if self.first[parameter]:
                _average(parameter.grad, step)


class _OffWhileEvaluating(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.exchanges = module, True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(inputs)
        return outputs

    def eval(self) -> nn.Module:
        self.exchanges = False
        return super().eval()


@mutant(caught=f"{APART}, loss full batch float32", workload="evaluation", world=2, step=1)
class NothingAfterAnEvaluation:
    """eval() turns the exchange off, and train() does not turn it on."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.wrapped = _OffWhileEvaluating(model)
        return self.wrapped

    def sync(self, model: nn.Module, step: Step) -> None:
        if self.wrapped.exchanges:
            average(model, step)
