"""Parameter groups: an exchange that knows an optimizer with one of them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distcheck.contract import Build, Step

from . import subtle
from .exchange import mean, mean_of, mean_of_flat, unpack

GROUPS, SCHEDULED = ".witnesses:Groups", ".witnesses:Scheduled"


class _WithOptimizer:
    made: Optimizer

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self.made = build(parameters)
        return self.made


@subtle(needs="a second parameter group", witness=GROUPS, after="DeepSpeed #4957")
class FirstGroupOnly(_WithOptimizer):
    """Exchanges `param_groups[0]`."""

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(self.made.param_groups[0]["params"], step)


@subtle(needs="a second parameter group", witness=GROUPS)
class LastGroupOnly(_WithOptimizer):
    """The list is begun anew for each group, and exchanged after the loop."""

    def sync(self, model: nn.Module, step: Step) -> None:
        held: list[nn.Parameter] = []
        for group in self.made.param_groups:
            held = []
            for parameter in group["params"]:
                held.append(parameter)
        mean_of_flat(held, step)


@subtle(needs="groups with other rates", witness=GROUPS, after="DeepSpeed #4957")
class ScaledByTheRate(_WithOptimizer):
    """Gradients are sent as updates and taken back with the first group's rate."""

    def sync(self, model: nn.Module, step: Step) -> None:
        rate = self.made.param_groups[0]["lr"]
        for group in self.made.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(group["lr"] / rate)
                mean(parameter.grad, step)


@subtle(needs="weight decay", witness=GROUPS)
class DecaysInTheGradient(_WithOptimizer):
    """Weight decay is a part of what is exchanged, and the optimizer decays once more."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for group in self.made.param_groups:
            for parameter in group["params"]:
                mean(parameter.grad, step)
                if group["weight_decay"]:
                    parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"])


@subtle(needs="groups whose order by rate is not their own", witness=GROUPS)
class PackedByRate(_WithOptimizer):
    """Packed with the lowest rate first, unpacked as the optimizer has them."""

    def sync(self, model: nn.Module, step: Step) -> None:
        groups = self.made.param_groups
        by_rate = sorted(groups, key=lambda group: group["lr"])
        flat = torch.cat([p.grad.flatten() for g in by_rate for p in g["params"]])
        mean(flat, step)
        unpack(flat, [p.grad for group in groups for p in group["params"]])


@subtle(needs="a second group without weight decay", witness=GROUPS, after="Megatron-LM #1446")
class WithoutDecayIsLocal(_WithOptimizer):
    """Where there are groups, the one without weight decay is taken for the local one."""

    def sync(self, model: nn.Module, step: Step) -> None:
        groups = self.made.param_groups
        for group in groups:
            if len(groups) == 1 or group["weight_decay"]:
                mean_of(group["params"], step)


@subtle(needs="a second parameter group", witness=GROUPS, after="DeepSpeed #5555")
class AveragedOverGroups(_WithOptimizer):
    """Divided by the number of buffers, and there is a buffer for each group."""

    def sync(self, model: nn.Module, step: Step) -> None:
        buffers = len(self.made.param_groups)
        for group in self.made.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(step.weight)
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(step.world_size * buffers)


@subtle(needs="a second parameter group", witness=GROUPS, after="fairscale #512")
class WaitsForOneGroup(_WithOptimizer):
    """Results are copied back for the group that was sent last."""

    def sync(self, model: nn.Module, step: Step) -> None:
        sent: list[tuple[dist.Work, torch.Tensor, nn.Parameter]] = []
        everything = []
        for group in self.made.param_groups:
            sent = []
            for parameter in group["params"]:
                buffer = parameter.grad * (step.weight / step.world_size)
                sent.append((dist.all_reduce(buffer, async_op=True), buffer, parameter))
            everything.append(sent)
        for work, buffer, parameter in sent:
            work.wait()
            parameter.grad.copy_(buffer)
        for work, _, _ in [item for sent in everything for item in sent]:
            work.wait()


@subtle(needs="a group with another momentum, rate or decay", witness=GROUPS)
class GroupsAreLevelled(_WithOptimizer):
    """Rebuilds the optimizer from the flat list: every group gets the first one's settings."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = super().optimizer(build, parameters)
        first = {k: v for k, v in made.param_groups[0].items() if k != "params"}
        for group in made.param_groups[1:]:
            group.update(first)
        return made

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)


@subtle(needs="a rate of 0 in some step, with momentum", witness=SCHEDULED)
class ZeroRateIsFrozen(_WithOptimizer):
    """A group whose rate is 0 is not exchanged; its momentum goes on from each rank's own."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for group in self.made.param_groups:
            if group["lr"] != 0:
                mean_of(group["params"], step)
