"""A ring all_reduce by hand: each rank communicates only with its two neighbors.

The gradient is cut into W chunks. In W - 1 rounds every chunk travels once around the ring and
each rank adds its own part to it (reduce-scatter); in W - 1 more rounds the finished chunks
travel around once again (all-gather). Each rank sends 2 (W - 1) / W of the gradient, whatever W
is: the least that an all_reduce can do.
"""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import RingOrder, Step, strategy


# A sparse gradient cannot be cut up; and a gradient is there on every rank, or on none.
@strategy(order=RingOrder(), scale="divide-after", declines=("sparse", "absent_on_some"))
def ring(model: nn.Module, step: Step) -> None:
    """Leaves the mean gradient over all samples of the step in every `parameter.grad`."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:  # frozen, or unused on every rank
            continue
        if step.weight != 1.0:  # unequal shards: weight each by its number of samples
            gradient.mul_(step.weight)
        flat = gradient.contiguous().view(-1)
        all_reduce(flat, step)
        gradient.copy_(flat.view_as(gradient)).div_(step.world_size)


def all_reduce(vector: torch.Tensor, step: Step) -> None:
    """Sums `vector` [n] over the ranks, in place; n may be smaller than the world, or 0."""
    if vector.is_cuda and dist.get_backend(step.group) == "gloo":
        on_host = vector.cpu()  # gloo sends and receives what is in the host's memory
        all_reduce(on_host, step)
        vector.copy_(on_host)
        return
    world, rank = step.world_size, step.rank
    chunks = vector.tensor_split(world)  # views; where W does not divide n the first are longer
    arriving = torch.empty_like(chunks[0])
    for distance in range(world - 1):  # what arrives has come `distance` ranks far
        leaves, arrives = chunks[(rank - distance) % world], chunks[(rank - distance - 1) % world]
        received = arriving[: len(arrives)]
        _exchange(leaves, received, step)
        arrives.add_(received)
    # Rank r now holds the finished chunk r + 1.
    for distance in range(world - 1):
        _exchange(chunks[(rank + 1 - distance) % world], chunks[(rank - distance) % world], step)


def _exchange(leaves: torch.Tensor, arrives: torch.Tensor, step: Step) -> None:
    """Sends to the next rank and receives from the one before, at once: no rank waits to send.

    As one batch, without which NCCL would finish each sending before the next call.
    """
    group = step.group
    after, before = (step.rank + 1) % step.world_size, (step.rank - 1) % step.world_size
    calls = []
    if leaves.numel() > 0:  # both neighbors know the chunk's size, so both leave it out
        calls.append(dist.P2POp(dist.isend, leaves, group=group, group_peer=after))
    if arrives.numel() > 0:
        calls.append(dist.P2POp(dist.irecv, arrives, group=group, group_peer=before))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
