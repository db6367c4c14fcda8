"""Some gradients, or some ranks, are left out."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import Step

from . import mutant

# Where replicas disagree, the loss of the run is not that of any single model either.
_ALL = "gradients rounding, gradients full batch float32, loss full batch float32, agreement"


@mutant(caught=_ALL)
def no_sync(model: nn.Module) -> None:
    """Every rank trains alone."""


@mutant(caught=_ALL)
def last_parameter_left_out(model: nn.Module, step: Step) -> None:
    """One layer is never synchronized (Megatron-LM #599, torchtitan #2387)."""
    for parameter in list(model.parameters())[:-1]:
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught=_ALL)
def reduce_without_broadcast(model: nn.Module, step: Step) -> None:
    """Rank 0 gets the mean, the others keep whatever the reduction left them."""
    for parameter in model.parameters():
        dist.reduce(parameter.grad, dst=0)
        parameter.grad /= step.world_size


@mutant(caught="gradients rounding, gradients full batch float32")
def broadcast_instead_of_mean(model: nn.Module) -> None:
    """Everybody takes rank 0's gradient: replicas agree, three quarters of the data is lost."""
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, src=0)


@mutant(caught="gradients rounding, gradients full batch float32")
def drops_the_last_rank(model: nn.Module, step: Step) -> None:
    """A range that ends one too early."""
    for parameter in model.parameters():
        gathered = [torch.empty_like(parameter.grad) for _ in range(step.world_size)]
        dist.all_gather(gathered, parameter.grad)
        parameter.grad.copy_(torch.stack(gathered[:-1]).mean(0))


@mutant(caught="gradients rounding, gradients full batch float32")
def counts_rank_0_twice(model: nn.Module, step: Step) -> None:
    """The last rank's part is replaced by a second copy of rank 0's."""
    for parameter in model.parameters():
        gathered = [torch.empty_like(parameter.grad) for _ in range(step.world_size)]
        dist.all_gather(gathered, parameter.grad)
        gathered[-1] = gathered[0]
        parameter.grad.copy_(torch.stack(gathered).mean(0))


@mutant(caught=_ALL)
def reduces_a_copy(model: nn.Module, step: Step) -> None:
    """Reduces `x.contiguous().clone()`, keeps `x` (Megatron-LM #5337)."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient.dim() > 1:
            gradient = gradient.t().contiguous()
        dist.all_reduce(gradient)
        gradient /= step.world_size


@mutant(caught=_ALL)
def drops_the_remainder(model: nn.Module, step: Step) -> None:
    """A flat buffer cut into W equal parts forgets what does not divide."""
    for parameter in model.parameters():
        flat = parameter.grad.view(-1)
        whole = len(flat) - len(flat) % 7
        dist.all_reduce(flat[:whole])
        flat[:whole] /= step.world_size


@mutant(caught=_ALL, workload="mlp")
def only_the_first_64_rows(model: nn.Module, step: Step) -> None:
    """Only the first 64 channels are right (pytorch #57077)."""
    for parameter in model.parameters():
        part = parameter.grad[:64]
        dist.all_reduce(part)
        part /= step.world_size


@mutant(caught=_ALL)
class WrapsAndCallsTheRawModule:
    """The wrapped model is built and the raw one is called (kohya #924)."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.wrapped = DistributedDataParallel(model)
        return self.wrapped.module

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        self.wrapped.require_backward_grad_sync = False
        return loss


@mutant(caught="gradients rounding, gradients full batch float32")
def clips_before_the_sync(model: nn.Module, step: Step) -> None:
    """Every rank clips its own part by its own norm, then the parts are averaged."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught=_ALL)
def clips_by_a_norm_of_its_own(model: nn.Module, step: Step) -> None:
    """Gradients are averaged, then clipped by a norm that differs per rank (DeepSpeed #1801)."""
    own = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad *= (0.1 / own) / step.world_size
