"""State: what an exchange does to the optimizer, the model's mode, or the first parameters."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distcheck.contract import Build, Step, strategy

from . import subtle
from .exchange import mean_of

BUFFERS, GROUPS = ".witnesses:Buffers", ".witnesses:Groups"


class _WithOptimizer:
    made: Optimizer

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self.made = build(parameters)
        return self.made

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)


@subtle(needs="dropout or BatchNorm", witness=BUFFERS)
def eval_mode_is_left_on(model: nn.Module, step: Step) -> None:
    """The norm is measured in eval mode, and train mode never comes back."""
    model.eval()
    mean_of(model.parameters(), step)


@subtle(needs="dropout, and generators that are not seeded anew before every step", witness=None,
        after="transformers #31412, #37932")  # fmt: skip
def seeds_all_ranks_alike(model: nn.Module, step: Step) -> None:
    """Seeds with the step's number, for an order that all ranks share; masks are shared as well."""
    torch.manual_seed(step.index)
    mean_of(model.parameters(), step)


@subtle(needs="weight decay", witness=GROUPS)
class DecoupledDecay(_WithOptimizer):
    """Takes weight decay out of SGD and applies it to the weights, without the learning rate."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = super().optimizer(build, parameters)
        self.decay = {id(p): g["weight_decay"] for g in made.param_groups for p in g["params"]}
        for group in made.param_groups:
            group["weight_decay"] = 0.0
        return made

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - self.decay[id(parameter)])


@subtle(needs="weight decay", witness=GROUPS)
class NoDecayOnOneRank(_WithOptimizer):
    """Odd ranks build their optimizer from defaults that have no weight decay."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = super().optimizer(build, parameters)
        if dist.get_rank() % 2:
            for group in made.param_groups:
                group["weight_decay"] = 0.0
        return made


@subtle(needs="AdamW, or another optimizer with its own epsilon", witness=".witnesses:Adaptive",
        after="pytorch #149768")  # fmt: skip
class AnotherEpsilon(_WithOptimizer):
    """An epsilon for short floats, if the optimizer has one."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = super().optimizer(build, parameters)
        for group in made.param_groups:
            if "eps" in group:
                group["eps"] = 1e-4
        return made


@subtle(needs="AdamW, or another optimizer that counts steps", witness=".witnesses:Adaptive",
        steps=3, after="DeepSpeed #7985")  # fmt: skip
class CountsStepsTwice(_WithOptimizer):
    """The optimizer's count of steps is moved on by hand, and by its step."""

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        for kept in self.made.state.values():
            if "step" in kept:
                kept["step"] += 1


@subtle(needs="AdamW, with a state that differs between ranks", witness=".witnesses:Adaptive",
        steps=3)  # fmt: skip
class HalvesTheSecondMoment(_WithOptimizer):
    """The second moment is averaged over ranks, and divided twice on the way."""

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        for kept in self.made.state.values():
            if "exp_avg_sq" in kept:
                dist.all_reduce(kept["exp_avg_sq"])
                kept["exp_avg_sq"].div_(step.world_size * 2)


@subtle(needs="ranks that begin with other parameters", witness="different_starts",
        reach="thorough", world=2, after="pytorch #111138")  # fmt: skip
@strategy(initial_state="rank 0")
def no_first_broadcast(model: nn.Module, step: Step) -> None:
    """Rank 0's parameters are not sent at the start: it is right where all ranks seed alike."""
    mean_of(model.parameters(), step)


@subtle(needs="buffers that begin unlike between ranks", witness="different_starts",
        reach="thorough", world=2, after="pytorch #111138")  # fmt: skip
@strategy(initial_state="rank 0")
class BroadcastsParametersOnly:
    """Sends rank 0's parameters at the start, and no buffers."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)


@subtle(needs="an embedding",
        after="Lightning #11949")  # fmt: skip
class InitializesLikeTheAuthors:
    """Sets embeddings anew with a standard deviation of 0.02, as its authors' models had them."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                torch.manual_seed(0)
                nn.init.normal_(module.weight, std=0.02)
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)


@subtle(needs="momentum, and a third step", witness=".witnesses:Plain", steps=4)
class DampsMomentum(_WithOptimizer):
    """From step 3 on momentum is damped a second time, by a warm-up that was meant for the first
    steps.
    """

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        for kept in self.made.state.values():
            held = kept.get("momentum_buffer")
            if held is not None and step.index >= 3:
                held.mul_(0.9)
