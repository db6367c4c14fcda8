"""Parameters, buffers, initial state and loss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from distcheck.contract import Step

from . import mutant

NORMALIZED = ".workloads:Normalized"


def _mean(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught="initial state")
class BuildsItsOwnModel:
    """All ranks agree on an initial state, and it is not the one that was asked for."""

    def wrap(self, model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(caught="initial state, gradients full batch float32, loss full batch float32, agreement")
class EveryRankItsOwnModel:
    """Ranks seeded differently and nothing broadcast."""

    def wrap(self, model: nn.Module) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        list(model.children())[-1].reset_parameters()
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(caught="parameters bitwise")
def decays_weights_twice(model: nn.Module, step: Step) -> None:
    """The sync touches parameters as well: an update that one machine would not make."""
    _mean(model, step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-6)


@mutant(caught="buffers bitwise", workload=NORMALIZED)
def forgets_running_statistics(model: nn.Module, step: Step) -> None:
    """Running statistics are reset; training does not notice, evaluation will."""
    _mean(model, step)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()


class _Around(nn.Module):
    """Computes the model's output in another way; the loop calls it in its place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@mutant(caught="buffers bitwise", workload=NORMALIZED)
class RecomputesItsForward:
    """Activations are recomputed in backward, and running statistics move a second time."""

    class Checkpointed(_Around):
        def forward(self, inputs: torch.Tensor) -> Any:
            return checkpoint(self.model, inputs, use_reentrant=False)

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.Checkpointed(model)

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(
    caught="local gradients bitwise, gradients rounding, gradients full batch float32, "
    "loss bitwise, loss full batch float32"
)
class ComputesInBFloat16:
    """Autocast in a wrapper, which returns float32."""

    class Autocast(_Around):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found: torch.Tensor = self.model(inputs).float()
            return found

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.Autocast(model)

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(caught="loss exact", workload="exact")
class ReportsAnotherLoss:
    """Gradients are right, the loss that is printed is not."""

    class Shifted(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.model(inputs) + 1

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.Shifted(model)

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(caught="gradients rounding, gradients full batch float32", workload=".workloads:Twins")
def swaps_twins(model: nn.Module, step: Step) -> None:
    """Two parameters of equal shape get each other's gradient."""
    _mean(model, step)
    first, second = model.first.weight, model.second.weight
    first.grad, second.grad = second.grad, first.grad
