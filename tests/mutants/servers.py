"""Parameter servers on a rank that has no data, and is said to have none."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant

SERVER = 0
_WRONG = "gradients rounding, gradients full batch float32"


def _serve(gradient: torch.Tensor, step: Step, *, counted: range, divisor: int) -> None:
    """Gathers weighted gradients on the server, which sends back their sum over the divisor."""
    if step.rank != SERVER:
        dist.send(gradient * step.weight, SERVER)
        dist.recv(gradient, SERVER)
        return
    received = torch.empty_like(gradient)
    for source in range(1, step.world_size):
        dist.recv(received, source)
        if source in counted:
            gradient += received
    gradient /= divisor
    for target in range(1, step.world_size):
        dist.send(gradient, target)


@mutant(caught=_WRONG, without_data=(SERVER,))
def server_counts_itself(model: nn.Module, step: Step) -> None:
    """Divides by all ranks: the server's zeros take part in the mean."""
    everyone = range(1, step.world_size)
    for parameter in model.parameters():
        _serve(parameter.grad, step, counted=everyone, divisor=step.world_size)


@mutant(caught=_WRONG, without_data=(SERVER,))
def server_stops_a_rank_early(model: nn.Module, step: Step) -> None:
    """`range(1, world_size - 1)`: the last rank sends, and is not added."""
    counted = range(1, step.world_size - 1)
    for parameter in model.parameters():
        _serve(parameter.grad, step, counted=counted, divisor=len(counted))


@mutant(caught=f"{_WRONG}, agreement", without_data=(SERVER,))
def server_keeps_the_sum(model: nn.Module, step: Step) -> None:
    """What is sent is right, what the server itself steps with is not."""
    everyone = range(1, step.world_size)
    for parameter in model.parameters():
        _serve(parameter.grad, step, counted=everyone, divisor=len(everyone))
        if step.rank == SERVER:
            parameter.grad *= len(everyone)
