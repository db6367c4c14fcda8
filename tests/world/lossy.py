"""Strategies that differ by design, and that are right about it: torch's own where they run on a
CPU. What is wrong on top of that is in tests/mutants/accepted.py.
"""

from collections.abc import Iterable
from functools import partial
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import Batch, Build

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
FP16 = f"{_HOOKS}.default_hooks:fp16_compress_hook"
BF16 = f"{_HOOKS}.default_hooks:bf16_compress_hook"


class Small:
    """One wide layer and one narrow, so that a world costs little; SGD with momentum."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """49 thousand parameters, for pictures of 32 x 32."""
        wide = nn.Linear(prod(sample_shape), 16)
        return nn.Sequential(nn.Flatten(), wide, nn.Tanh(), nn.Linear(16, classes))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross-entropy, the mean over the shard."""
        return F.cross_entropy(model(batch.inputs), batch.labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The momentum is each rank's own."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class SendsNothing:
    """An optimizer around another, whose ranks never exchange anything."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self) -> None:
        self.inner.step()


class MixesFirst(SendsNothing):
    """Averages parameters before the step, as gossip over all ranks."""

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
        super().step()


class Decaying(Small):
    """Its update depends on the parameters."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """With weight decay."""
        return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)


class Warming(Small):
    """Its rate is 0 in the first step, which moves nothing."""

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """From step 1 on 0.05."""
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (step > 0)


class Overflowing(Small):
    """The gradient of one bias is infinite, whatever was read."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """As small."""
        model = super().model(sample_shape=sample_shape, classes=classes)
        wide = model.get_submodule("1")
        wide.bias.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        return model


class _AsNCCL(ModuleType):
    """torch.distributed, with the futures of NCCL's all_gather: a list of the list of tensors.
    torch's quantizing hooks count on that, and fail on gloo, whose futures hold the tensors.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_gather(tensors: list[torch.Tensor], *handed: Any, **named: Any) -> Any:
        """The same, its future's value in a list."""
        work = dist.all_gather(tensors, *handed, **named)
        nested: Future[Any] = work.get_future().then(lambda _: [tensors])
        return SimpleNamespace(get_future=lambda: nested)


def per_tensor(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """torch's quantization_pertensor_hook: eight bits, one range a bucket."""
    quantization_hooks.dist = _AsNCCL("dist")  # type: ignore[attr-defined]
    hook = quantization_hooks.quantization_pertensor_hook
    return hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def symmetric_4(model: nn.Module) -> None:
    """Four bits, of which the lowest number is not used; one range for each tensor."""
    for parameter in model.parameters():
        gradient = parameter.grad
        quantum = gradient.abs().max() / 7
        whole = (gradient / quantum).round().to(torch.int8)
        everyone = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        quanta = [torch.empty_like(quantum) for _ in everyone]
        dist.all_gather(everyone, whole)
        dist.all_gather(quanta, quantum)
        total = sum(q * w.float() for q, w in zip(quanta, everyone, strict=True))
        parameter.grad = (total / len(everyone)).to(gradient.dtype)


def one_grid(model: nn.Module) -> None:
    """Eight bits for all ranks alike, and the whole numbers are added up."""
    for parameter in model.parameters():
        gradient = parameter.grad
        quantum = gradient.abs().max()
        dist.all_reduce(quantum, dist.ReduceOp.MAX)
        quantum /= 127
        whole = (gradient / quantum).round().to(torch.int32)
        dist.all_reduce(whole)
        parameter.grad.copy_(whole * (quantum / dist.get_world_size()))


class PowerSGD:
    """DDP with torch's powerSGD_hook, two steps exact, then two directions a matrix."""

    state: Any = partial(
        powerSGD_hook.PowerSGDState, None, matrix_approximation_rank=2, start_powerSGD_iter=2
    )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The state is each rank's own."""
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(type(self).state(), powerSGD_hook.powerSGD_hook)
        return wrapped


class PowerSGDWithoutFeedback(PowerSGD):
    """From the first step on, five directions, and what is left over is dropped."""

    state = partial(
        powerSGD_hook.PowerSGDState, None, matrix_approximation_rank=5, start_powerSGD_iter=0,
        use_error_feedback=False, warm_start=False,
    )  # fmt: skip


class PostLocalSGD:
    """DDP with torch's post_localSGD_hook and no groups within the world, and its optimizer."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """From the first step on nothing is exchanged in backward."""
        wrapped = DistributedDataParallel(model)
        state = post_localSGD_hook.PostLocalSGDState(
            None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        return wrapped

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Averages after steps 0, 2, 4."""
        return PostLocalSGDOptimizer(build(parameters), PeriodicModelAverager(period=2))


class AveragesAfter:
    """A mean of all parameters by a hook of the optimizer, after some of its steps."""

    steps: tuple[int, ...] = (0, 2, 4)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keeps the model."""
        self.model, self.step = model, -1
        return model

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """With the hook."""
        made = build(parameters)
        made.register_step_post_hook(self.average)
        return made

    def average(self, *_: object) -> None:
        """After a step."""
        self.step += 1
        for parameter in self.model.parameters() if self.step in self.steps else ():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


class AveragesAfterOddSteps(AveragesAfter):
    """Counted from 1."""

    steps = (1, 3, 5)


class AveragesTooLate(AveragesAfter):
    """The first of them is left out."""

    steps = (3, 5)


class EverySecond(PeriodicModelAverager):
    """What torch's PostLocalSGDOptimizer is given as its averager, by name."""

    def __init__(self) -> None:
        super().__init__(period=2)


def averages_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps, and takes the mean of the parameters after steps 2, 5, 8."""
    optimizer.step()
    state = optimizer.state[next(model.parameters())]
    state["taken"] = taken = state.get("taken", 0) + 1
    if taken % 3 == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
