"""Ranks that crash, hang or disagree: exit code 4, the cause named."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant


def _mean(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught="outcome", exit_code=4)
def dies_after_the_last_collective(model: nn.Module, step: Step) -> None:
    """Everything was right, and then a rank is killed: some harnesses call that a pass."""
    _mean(model, step)
    if step.index == 2 and step.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


@mutant(caught="outcome", exit_code=4)
def leaves_quietly(model: nn.Module, step: Step) -> None:
    """os._exit(0) in the middle: an exit status of 0 is no proof of anything."""
    if step.index == 1 and step.rank == 1:
        os._exit(0)
    _mean(model, step)


@mutant(caught="outcome", exit_code=4)
def raises_on_one_rank(model: nn.Module, step: Step) -> None:
    """The others are waiting in a collective when it happens."""
    if step.index == 1 and step.rank == 2:
        raise ValueError("an error of rank 2's own")
    _mean(model, step)


@mutant(caught="outcome", exit_code=4, world=3, hangs=True)
def ring_with_a_fixed_peer(model: nn.Module, step: Step) -> None:
    """`rank ^ 1` is everybody's peer at 2 and 4 ranks; at 3 rank 2 waits for rank 0, which has
    another. (Without the remainder it would ask gloo for a rank 3, which reads beyond its table.)
    """
    for parameter in model.parameters():
        other = torch.empty_like(parameter.grad)
        peer = (step.rank ^ 1) % step.world_size
        if step.rank < peer:
            dist.send(parameter.grad, peer)
            dist.recv(other, peer)
        else:
            dist.recv(other, peer)
            dist.send(parameter.grad, peer)
        parameter.grad.add_(other).div_(2)


@mutant(caught="outcome", exit_code=4, hangs=True)
def one_rank_skips_a_collective(model: nn.Module, step: Step) -> None:
    """A collective inside a condition that one rank does not meet (Megatron-LM !3918)."""
    if step.rank == 1 and step.index == 2:
        return
    _mean(model, step)


@mutant(caught="outcome", exit_code=4, workload=".small:Small", world=2, steps=1, hangs=True)
def other_way_round_on_one_rank(model: nn.Module, step: Step) -> None:
    """Collectives in the order of a hash: rank 1 begins with the last parameter."""
    parameters = list(model.parameters())
    for parameter in parameters if step.rank == 0 else reversed(parameters):
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size
