"""Exchanges that are written by hand: rings, gathered lists, servers."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant

SMALL = ".small:Small"
WRONG = "gradients rounding, gradients full batch float32"
APART = "gradients rounding, gradients full batch float32, loss full batch float32, agreement"


def _pass_on(sent: torch.Tensor, step: Step) -> torch.Tensor:
    """To the next rank, and what the one before has sent."""
    received = torch.empty_like(sent)
    world, rank = step.world_size, step.rank
    works = [
        dist.isend(sent.contiguous(), (rank + 1) % world),
        dist.irecv(received, (rank - 1) % world),
    ]
    for work in works:
        work.wait()
    return received


@mutant(caught=WRONG, workload=SMALL, world=4, steps=2)
def list_of_one_tensor(model: nn.Module, step: Step) -> None:
    """`[t] * world` is one tensor, and the last to arrive is in every place."""
    for parameter in model.parameters():
        gathered = [torch.empty_like(parameter.grad)] * step.world_size
        dist.all_gather(gathered, parameter.grad)
        parameter.grad.copy_(torch.stack(gathered).mean(0))


@mutant(caught=APART, workload=SMALL, world=3, steps=2)
def ring_passes_on_its_sum(model: nn.Module, step: Step) -> None:
    """What goes round is the sum so far, not what was received: neighbors count more than once."""
    for parameter in model.parameters():
        total = parameter.grad * step.weight
        for _ in range(step.world_size - 1):
            total = total + _pass_on(total, step)
        parameter.grad.copy_(total / step.world_size)


@mutant(caught=APART, workload=SMALL, world=4, steps=2)
def ring_one_round_short(model: nn.Module, step: Step) -> None:
    """World - 2 rounds: every rank lacks the one that follows it."""
    for parameter in model.parameters():
        passing = parameter.grad.clone()
        for _ in range(step.world_size - 2):
            passing = _pass_on(passing, step)
            parameter.grad += passing
        parameter.grad /= step.world_size


@mutant(caught=WRONG, workload=SMALL, world=3, steps=2)
def ring_of_chunks_one_off(model: nn.Module, step: Step) -> None:
    """A ring over chunks whose second half starts one chunk too early: it sends single ranks' parts
    round, over the sums.
    """
    world, rank = step.world_size, step.rank
    for parameter in model.parameters():
        flat = parameter.grad.view(-1) * step.weight
        size = -(-len(flat) // world)
        chunks = list(nn.functional.pad(flat, (0, size * world - len(flat))).split(size))
        for turn in range(world - 1):
            into = (rank - turn - 1) % world
            chunks[into] = chunks[into] + _pass_on(chunks[(rank - turn) % world], step)
        for turn in range(world - 1):
            chunks[(rank - turn - 1) % world] = _pass_on(chunks[(rank - turn) % world], step)
        parameter.grad.copy_(torch.cat(chunks)[: len(flat)].view_as(parameter) / world)


@mutant(caught=WRONG, workload=SMALL, world=3, steps=2, seldom=True)
def sends_the_list_it_got(model: nn.Module, step: Step) -> None:
    """A server averages what it has gathered, and sends its own gradients in place of the means."""
    own = [parameter.grad for parameter in model.parameters()]
    means = []
    for gradient in own:
        gathered = [torch.empty_like(gradient) for _ in range(step.world_size)]
        dist.gather(gradient, gathered if step.rank == 0 else None, dst=0)
        means.append(torch.stack(gathered).mean(0))
    for gradient in own:
        dist.broadcast(gradient, src=0)
