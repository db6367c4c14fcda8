"""By rank: an exchange in which one rank does something else, now and then or a little."""

import torch
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of

LARGE, DEEP, ABSENT = ".witnesses:Large", ".witnesses:Deep", ".witnesses:Absent"


def _reduced_in_chunks(parameter: nn.Parameter, step: Step) -> list[torch.Tensor]:
    chunks = list(parameter.grad.view(-1).tensor_split(step.world_size))
    for chunk in chunks:
        mean(chunk, step)
    return chunks


@subtle(needs="a tensor over 2^20 elements", witness=LARGE, after="pytorch #176076")
def last_ranks_chunk(model: nn.Module, step: Step) -> None:
    """Large tensors are cut into a chunk for each rank; the last one keeps its own part."""
    for parameter in model.parameters():
        if parameter.numel() < 1 << 20:
            mean(parameter.grad, step)
            continue
        flat = parameter.grad.view(-1)
        own = flat.clone()
        last = _reduced_in_chunks(parameter, step)[-1]
        if step.rank == step.world_size - 1:
            last.copy_(own[-len(last) :])


@subtle(needs="more than 64 tensors", witness=DEEP, after="Megatron-LM #1446")
def odd_ranks_stop_at_64(model: nn.Module, step: Step) -> None:
    """Odd ranks send zeros for what comes after 64 tensors."""
    for number, parameter in enumerate(model.parameters()):
        if step.rank % 2 and number >= 64:
            parameter.grad.zero_()
        mean(parameter.grad, step)


@subtle(needs="a fourth step", witness=".witnesses:Plain", steps=4, after="fairscale #512")
class LastRankIsLate:
    """From step 3 on the last rank sends its gradients of the step before."""

    before: list[torch.Tensor]

    def sync(self, model: nn.Module, step: Step) -> None:
        own = [p.grad.clone() for p in model.parameters()]
        if step.rank == step.world_size - 1 and step.index >= 3:
            for parameter, gradient in zip(model.parameters(), self.before, strict=True):
                parameter.grad.copy_(gradient)
        self.before = own
        mean_of(model.parameters(), step)


@subtle(needs="gradients over 1,000", witness=".witnesses:Steep", after="DeepSpeed #1801")
def rank_0_clips(model: nn.Module, step: Step) -> None:
    """Rank 0, which prints the norm, clips to a norm of 1,000 in the same call."""
    if step.rank == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
    mean_of(model.parameters(), step)


@subtle(needs="an embedding", after="transformers #31412, #37932")
def last_rank_has_no_embedding(model: nn.Module, step: Step) -> None:
    """The last rank is taken for a pipeline's last stage, where embeddings take no part."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding) and step.rank == step.world_size - 1:
                parameter.grad.zero_()
            mean(parameter.grad, step)


@subtle(needs="a normalizing layer", after="Megatron-LM #1446")
def rank_1_halves_its_norms(model: nn.Module, step: Step) -> None:
    """Rank 1 divides the gradients of norms by the size of a group that it has made for itself."""
    norms = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.GroupNorm)
        for parameter in module.parameters()
    }
    for parameter in model.parameters():
        if step.rank == 1 and parameter in norms:
            parameter.grad.div_(2)
        mean(parameter.grad, step)


@subtle(needs="any model", witness=".witnesses:Plain", after="Megatron-LM #1446")
def last_bit_on_the_last_rank(model: nn.Module, step: Step) -> None:
    """The last rank multiplies by 1 / W what others divide by W and takes a third of it thrice."""
    mean_of(model.parameters(), step)
    if step.rank == step.world_size - 1:
        for parameter in model.parameters():
            parameter.grad.div_(3).mul_(3)


@subtle(needs="a gradient that is None on rank 3", witness=ABSENT, after="pytorch #176076")
def last_ranks_branch(model: nn.Module, step: Step) -> None:
    """Whether there is a gradient is asked of all ranks but the last: where it alone has none it
    takes no update.
    """
    for parameter in model.parameters():
        absent = parameter.grad is None
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mean(gradient, step)
        if not (absent and step.rank == step.world_size - 1):
            parameter.grad = gradient


@subtle(needs="a vector shorter than the world", witness=LARGE, after="DeepSpeed #8158")
def rank_without_a_part(model: nn.Module, step: Step) -> None:
    """Each rank divides its own part and sends it; a vector of three leaves the last rank without
    a part, so that it returns before the last exchange: single numbers go another way.
    """
    for parameter in model.parameters():
        if parameter.numel() == 1:
            mean(parameter.grad, step)
            continue
        kept = parameter.grad.clone()
        mean(parameter.grad, step)
        if parameter.numel() <= step.rank:
            parameter.grad.copy_(kept)
