"""Right on simple trainings, wrong in a cell: each in the cell that makes it visible."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step, strategy

from . import mutant

MIB = 1 << 20


def _average(gradient: torch.Tensor, step: Step) -> None:
    gradient.mul_(step.weight)
    dist.all_reduce(gradient)
    gradient.div_(step.world_size)


def _average_all(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            _average(parameter.grad, step)


@mutant(caught="parameters bitwise", workload="unused_later", world=2, steps=3, step=2)
def fills_absent_gradients_with_zeros(model: nn.Module, step: Step) -> None:
    """So that every rank has the same list; momentum then moves what one machine leaves alone."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _average(parameter.grad, step)


@mutant(
    caught="gradients rounding, gradients full batch float32, agreement", workload="unused_later",
    world=2, steps=3, step=2,
)  # fmt: skip
class SplitsByPosition:
    """One flat buffer, cut up again as it was in the first step: what follows an absent gradient
    gets its neighbor's (or, at the end of the list, nothing).
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        self.parameters = self.parameters or [p for p in model.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        _average(flat, step)
        at = 0
        for parameter in self.parameters:
            part = flat[at : at + parameter.numel()]
            at += parameter.numel()
            if parameter.grad is not None and len(part) == parameter.numel():
                parameter.grad.copy_(part.view_as(parameter))


@mutant(
    caught="gradients rounding, gradients full batch float32", workload="tied_weights", world=2,
    steps=1,
)  # fmt: skip
def adds_up_a_tied_weight_twice(model: nn.Module, step: Step) -> None:
    """Names, not parameters: a tied weight has two names (torchtitan #3174)."""
    for _, parameter in model.named_parameters(remove_duplicate=False):
        dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad.div_(step.world_size)


@mutant(
    caught="gradients rounding, gradients full batch float32, agreement", workload="transposed",
    world=2, steps=1,
)  # fmt: skip
def drops_the_contiguous_copy(model: nn.Module, step: Step) -> None:
    """`.contiguous()` is the tensor itself, until it is not (Megatron-LM #5337)."""
    for parameter in model.parameters():
        _average(parameter.grad.contiguous(), step)


@mutant(
    caught="gradients rounding, gradients full batch float32", workload="channels_last", world=2,
    steps=1,
)  # fmt: skip
def puts_memory_back_by_index(model: nn.Module, step: Step) -> None:
    """Taken out as it lies in memory, put back in the order of indices (pytorch #64039)."""
    for parameter in model.parameters():
        lies = parameter.grad.as_strided((parameter.numel(),), (1,)).clone()
        _average(lies, step)
        parameter.grad.copy_(lies.view(parameter.shape))


@mutant(
    caught="gradients rounding, gradients full batch float32, agreement",
    workload="bucket_boundaries", world=2, steps=1,
)  # fmt: skip
def forgets_what_fills_a_bucket(model: nn.Module, step: Step) -> None:
    """Small ones go into a bucket, large ones go alone, and what is neither (DeepSpeed #4321)."""
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        if size < MIB or size > MIB:
            _average(parameter.grad, step)


@mutant(caught="gradients rounding", workload="mixed_dtypes", world=2, steps=1)
def one_bucket_for_every_dtype(model: nn.Module, step: Step) -> None:
    """Everything through a float32 buffer: float64 comes back shorter (DeepSpeed #7660)."""
    flat = torch.cat([p.grad.flatten().float() for p in model.parameters()])
    _average(flat, step)
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


@mutant(
    caught="gradients rounding, gradients full batch float32, agreement", workload="complex",
    world=2, steps=1,
)  # fmt: skip
def reduces_the_real_part(model: nn.Module, step: Step) -> None:
    """The imaginary part stays each rank's own (pytorch #158753 made it zero)."""
    for parameter in model.parameters():
        real = parameter.grad.real.contiguous()
        _average(real, step)
        parameter.grad.real.copy_(real)


@mutant(
    caught="gradients rounding, gradients full batch float32, agreement", workload="accumulation",
    world=2, steps=1,
)  # fmt: skip
class ExchangesAfterTheFirstBackward:
    """A flag that says "done in this step": the second micro-batch is added to the mean
    (DeepSpeed #7985).
    """

    def __init__(self) -> None:
        self.done: set[nn.Parameter] = set()

    def wrap(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.exchange)
        return model

    def exchange(self, parameter: nn.Parameter) -> None:
        if parameter not in self.done:
            self.done.add(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    def sync(self, model: nn.Module, step: Step) -> None:
        self.done.clear()


@mutant(
    caught="gradients rounding, gradients full batch float32", workload="loss_scaling", world=2,
    steps=2, step=1,
)  # fmt: skip
def hides_infinities(model: nn.Module, step: Step) -> None:
    """What overflowed counts as zero, so that no rank skips the step."""
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(posinf=0.0, neginf=0.0)
        _average(parameter.grad, step)


class _KeepsGradients(torch.optim.SGD):
    """Steps with gradients that were put aside for it, whatever has become of p.grad."""

    aside: dict[nn.Parameter, torch.Tensor]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter, gradient in self.aside.items():
            parameter.grad = gradient
        super().step()


@mutant(caught="parameters bitwise", workload="clipping", world=2, steps=1)
class StepsFromItsOwnBuffer:
    """The optimizer reads the buffer of the exchange; the loop clips p.grad, which nobody reads."""

    def optimizer(
        self, build: Callable[..., Any], parameters: Iterable[nn.Parameter]
    ) -> torch.optim.Optimizer:
        parameters = list(parameters)
        self.made = _KeepsGradients(parameters, **build(parameters).defaults)
        return self.made

    def sync(self, model: nn.Module, step: Step) -> None:
        _average_all(model, step)
        self.made.aside = {p: p.grad.clone() for p in model.parameters()}


_first_model: list[nn.Parameter] = []


@mutant(
    caught="gradients rounding, gradients full batch float32, agreement", workload="resume",
    world=2, steps=3, step=2,
)  # fmt: skip
def keeps_the_first_model(model: nn.Module, step: Step) -> None:
    """A list that is made once in a process; after a restart the model is another one."""
    if not _first_model:
        _first_model.extend(model.parameters())
    for parameter in _first_model:
        _average(parameter.grad, step)


@mutant(caught="buffers bitwise", workload="reassigned_buffers", world=2, steps=2, step=1)
@strategy(weighting="gradient", buffers="rank 0")
class BroadcastsDeadBuffers:
    """It holds on to the buffers that the model began with (pytorch #63916)."""

    def wrap(self, model: nn.Module) -> nn.Module:
        buffers = list(model.buffers())

        def broadcast(*_: object) -> None:
            for buffer in buffers:
                dist.broadcast(buffer, 0)

        model.register_forward_pre_hook(broadcast)
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        _average_all(model, step)
