"""By size: an exchange that is right for tensors as large as its author's."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of, mean_of_flat

LARGE, HUGE = ".witnesses:Large", ".witnesses:Huge"
CHUNK = 1 << 20
CAP = 25 << 20


@subtle(needs="a tensor over 2^20 elements, not a multiple", witness=LARGE, after="DeepSpeed #3832")
def chunks_of_a_million(model: nn.Module, step: Step) -> None:
    """Large tensors go in chunks of 2^20 elements; what remains after the last one is left out."""
    for parameter in model.parameters():
        flat = parameter.grad.view(-1)
        if len(flat) <= CHUNK:
            mean(flat, step)
        for start in range(0, len(flat) - CHUNK, CHUNK):
            mean(flat[start : start + CHUNK], step)


@subtle(needs="a tensor over 25 MB", witness=HUGE, reach="size", after="DeepSpeed #3832")
def larger_than_the_cap(model: nn.Module, step: Step) -> None:
    """Tensors larger than a bucket's 25 MB fit into none."""
    mean_of([p for p in model.parameters() if p.numel() * p.element_size() <= CAP], step)


@subtle(needs="parameters of over 25 MB together", witness=HUGE, reach="size",
        after="DeepSpeed #4321")  # fmt: skip
def what_ends_a_bucket(model: nn.Module, step: Step) -> None:
    """A bucket goes out when the next tensor would not fit, and that tensor goes nowhere."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in model.parameters():
        size += parameter.numel() * parameter.element_size()
        if size > CAP:
            mean_of_flat(bucket, step)
            bucket, size = [], 0
        else:
            bucket.append(parameter)
    mean_of_flat(bucket, step)


@subtle(needs="a vector of one element", witness=LARGE, after="horovod #2375")
def vectors_of_one_element(model: nn.Module, step: Step) -> None:
    """A vector of one element is added up, and divided only where it is longer."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        if parameter.ndim == 0 or parameter.numel() > 1:
            parameter.grad.div_(step.world_size)


@subtle(needs="a tensor whose size is a power of two, over 1,024", witness=LARGE)
def powers_of_two(model: nn.Module, step: Step) -> None:
    """A fast path for sizes that are powers of two begins at 2,048, and returns a copy."""
    for parameter in model.parameters():
        size = parameter.numel()
        if size > 1024 and size & (size - 1) == 0:
            mean(parameter.grad.view(2, -1).t().contiguous(), step)
        else:
            mean(parameter.grad, step)


@subtle(needs="a vector of two or three elements, fewer than ranks", witness=LARGE,
        after="pytorch #176076")  # fmt: skip
def fewer_elements_than_ranks(model: nn.Module, step: Step) -> None:
    """A reduce-scatter by chunks has nothing for vectors shorter than the world; single numbers
    have a path of their own.
    """
    for parameter in model.parameters():
        if parameter.numel() == 1 or parameter.numel() >= step.world_size:
            mean(parameter.grad, step)


@subtle(needs="a matrix of one row, or of one column", witness=LARGE)
def a_row_is_a_vector(model: nn.Module, step: Step) -> None:
    """Matrices of one row are squeezed to vectors, which share the biases' list and are lost."""
    matrices = [p for p in model.parameters() if p.squeeze().ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    mean_of(matrices, step)
    mean_of(vectors, step)


@subtle(needs="a tensor over 2^20 elements, whose size 7 does not divide", witness=LARGE,
        after="DeepSpeed #8158")  # fmt: skip
def pieces_of_equal_size(model: nn.Module, step: Step) -> None:
    """Over 2^20 elements a tensor is cut into seven pieces of equal size; the rest is dropped."""
    for parameter in model.parameters():
        flat = parameter.grad.view(-1)
        if len(flat) <= CHUNK:
            mean(flat, step)
            continue
        piece = len(flat) // 7
        for number in range(7):
            mean(flat[number * piece : (number + 1) * piece], step)


@subtle(needs="a tensor over 4 MB", witness=LARGE, after="Megatron-LM #5337")
def large_ones_through_a_pinned_copy(model: nn.Module, step: Step) -> None:
    """Over 4 MB a staging copy is used; it is copied back as far as the buffer's first 4 MB."""
    for parameter in model.parameters():
        staged = parameter.grad.flatten().clone()
        mean(staged, step)
        fits = (4 << 20) // staged.element_size()
        parameter.grad.view(-1)[:fits] = staged[:fits]


@subtle(needs="over 2^24 elements in one buffer", witness="over_2_24_elements", reach="size",
        world=2, steps=1)  # fmt: skip
def offsets_in_float32(model: nn.Module, step: Step) -> None:
    """Offsets into the buffer are float32: beyond 2^24 they are even numbers."""
    gradients = [p.grad for p in model.parameters()]
    sizes = torch.tensor([g.numel() for g in gradients], dtype=torch.float32)
    ends = sizes.cumsum(0)
    flat = torch.cat([g.flatten() for g in gradients])
    mean(flat, step)
    for gradient, size, end in zip(gradients, sizes, ends, strict=True):
        start = int(end) - int(size)
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))


@subtle(needs="a tensor over 1,024 rows", witness=LARGE, after="pytorch #57077")
def only_1024_rows(model: nn.Module, step: Step) -> None:
    """A grid of 1,024 blocks of rows: what is below is not reached."""
    for parameter in model.parameters():
        mean(parameter.grad[:1024] if parameter.ndim else parameter.grad, step)


@subtle(needs="more than 2^20 elements", witness=LARGE, after="apex 89ae9e5")
def ring_for_large_ones(model: nn.Module, step: Step) -> None:
    """Over 2^20 elements a ring is used, whose last round is missing: the part that comes back
    to its owner is short of one rank.
    """
    for parameter in model.parameters():
        if parameter.numel() <= CHUNK:
            mean(parameter.grad, step)
            continue
        own = parameter.grad.mul_(step.weight / step.world_size)
        passed = own.clone()
        for _ in range(step.world_size - 2):
            came = torch.empty_like(passed)
            works = [
                dist.isend(passed, (step.rank + 1) % step.world_size),
                dist.irecv(came, (step.rank - 1) % step.world_size),
            ]
            for work in works:
                work.wait()
            own.add_(came)
            passed = came
        dist.broadcast(own, 0)
