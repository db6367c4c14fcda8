"""AdamW's fused kernel, with an exchange before its step; and one that counts its steps twice."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Build, Step


class FusedSteps:
    """One kernel for all tensors; in AdamW it counts steps in float32 whatever the default is."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        self.made = build(parameters)
        for group in self.made.param_groups:
            group["fused"] = True
        return self.made

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size


class FusedAndCountedTwice(FusedSteps):
    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        for kept in self.made.state.values():
            if "step" in kept:
                kept["step"] += 1
