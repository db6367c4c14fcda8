"""Gradients that are absent, or zero, on some ranks or in some steps."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of, unpack

ABSENT = ".witnesses:Absent"


def _count(present: bool, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> int:
    flag = torch.tensor(float(present))
    dist.all_reduce(flag, op=op)
    return int(flag)


@subtle(needs="a gradient that is None on some ranks", witness=ABSENT, after="pytorch #128949",
        exit_code=4)  # fmt: skip
def skips_what_is_absent(model: nn.Module, step: Step) -> None:
    """A rank without a gradient skips the collective, and meets the others in the next one."""
    mean_of(model.parameters(), step)


@subtle(needs="a gradient that is None on some ranks", witness=ABSENT, after="pytorch #128949")
def zeros_are_sent_and_nothing_is_kept(model: nn.Module, step: Step) -> None:
    """A rank without a gradient sends zeros, and throws away the mean that comes back."""
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mean(gradient, step)


@subtle(needs="a gradient that is None on some ranks", witness=ABSENT, after="pytorch #36516")
def mean_of_those_who_have_it(model: nn.Module, step: Step) -> None:
    """Divided by the number of ranks that have the gradient, not of those that have samples."""
    for parameter in model.parameters():
        having = _count(parameter.grad is not None)
        if having:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.mul_(step.weight)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(having)


@subtle(needs="a gradient that is zero on some ranks", witness=ABSENT)
def mean_of_what_is_not_zero(model: nn.Module, step: Step) -> None:
    """A gradient of zeros is taken for one that is absent, and its rank does not count."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        having = _count(bool(parameter.grad.any()))
        parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(max(having, 1))


@subtle(needs="a gradient that is zero on some ranks", witness=ABSENT, after="pytorch #128949")
def zero_on_one_is_left_alone(model: nn.Module, step: Step) -> None:
    """Exchanged only where all ranks have something else than zeros."""
    for parameter in model.parameters():
        has = parameter.grad is not None and bool(parameter.grad.any())
        if _count(has) == step.world_size:
            mean(parameter.grad, step)


class _FromTheFirstStep:
    def __init__(self) -> None:
        self.taken: list[nn.Parameter] = []


@subtle(needs="a gradient that comes later", witness=".witnesses:AbsentAtFirst",
        after="Lightning #20340")  # fmt: skip
class ListedInTheFirstStep(_FromTheFirstStep):
    """Who has a gradient is agreed in the first step, for ever: what comes later stays alone."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if not self.taken:
            self.taken = [p for p in model.parameters() if _count(p.grad is not None)]
        for parameter in self.taken:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mean(parameter.grad, step)


@subtle(needs="a gradient that rank 0 has not and others have", witness=ABSENT,
        after="Megatron-LM !3918")  # fmt: skip
def as_rank_0_has_them(model: nn.Module, step: Step) -> None:
    """Rank 0 says which gradients there are; what only others have is exchanged by none."""
    parameters = list(model.parameters())
    has = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.broadcast(has, 0)
    for parameter, wanted in zip(parameters, has, strict=True):
        if wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mean(parameter.grad, step)


@subtle(needs="a gradient that is None on some ranks", witness=ABSENT, after="DeepSpeed #8158")
def padded_to_the_longest(model: nn.Module, step: Step) -> None:
    """What there is goes into one buffer, padded to the longest of any rank: offsets differ."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    longest = torch.tensor(flat.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest)).to(flat)
    padded[: flat.numel()] = flat
    mean(padded, step)
    unpack(padded[: flat.numel()], gradients)


@subtle(needs="a gradient that is absent in some step", witness=".witnesses:AbsentLater",
        steps=3, after="Megatron-LM #4609")  # fmt: skip
class TheLastOneThereWas:
    """Where no rank has a gradient, the last one there was is used once more."""

    def __init__(self) -> None:
        self.last: dict[nn.Parameter, torch.Tensor] = {}

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            if not _count(parameter.grad is not None):
                parameter.grad = self.last.get(parameter, torch.zeros_like(parameter)).clone()
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mean(parameter.grad, step)
            self.last[parameter] = parameter.grad.clone()


@subtle(needs="a rank whose gradients of one layer are all zero", witness=ABSENT,
        after="alf #1475")  # fmt: skip
def zeros_become_none(model: nn.Module, step: Step) -> None:
    """To save memory, a gradient of zeros is dropped before the exchange, on each rank alone."""
    for parameter in model.parameters():
        if parameter.grad is not None and not bool(parameter.grad.any()):
            parameter.grad = None
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mean(gradient, step)


@subtle(needs="a gradient that no rank has, with momentum or weight decay",
        witness=".witnesses:AbsentLater", steps=3, after="alf #1475")  # fmt: skip
def none_becomes_zero(model: nn.Module, step: Step) -> None:
    """Where no rank has a gradient, zeros are made: momentum moves what one process leaves."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean(parameter.grad, step)


@subtle(needs="a gradient that is None on some ranks", witness=ABSENT, after="alf #1475")
def none_stays_none_where_it_was(model: nn.Module, step: Step) -> None:
    """The mean is formed over all, and taken off again where backward had made no gradient."""
    absent = [p for p in model.parameters() if p.grad is None]
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean(parameter.grad, step)
    for parameter in absent:
        parameter.grad = None
