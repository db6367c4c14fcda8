"""Calls that gloo takes and that are rarely meant: each is a remark, since what comes of it may be
right all the same.
"""

import torch
import torch.distributed as dist

from tests.wrong_programs import ODD, WORLD, wrong

_KIND = "unusual call"


@wrong(_KIND, "other-shapes", on_gloo="")
def as_many_elements_in_another_shape(rank: int, wrong: bool) -> None:
    """One rank reduces the transposed gradient."""
    shape = (2, 3) if wrong and rank == ODD else (3, 2)
    dist.all_reduce(torch.ones(shape))  # named


@wrong(_KIND, "other-shapes", on_gloo="")
def another_order_in_memory(rank: int, wrong: bool) -> None:
    """The same shape, of which one rank has the columns one after the other; right: all have."""
    tensor = torch.arange(6.0).view(2, 3).t()
    if wrong and rank != ODD:
        tensor = tensor.contiguous()
    dist.all_reduce(tensor)  # named


@wrong(_KIND, "other-shapes", on_gloo="")
def a_message_of_another_shape(rank: int, wrong: bool) -> None:
    """A row is received as a column."""
    if rank == 0:
        dist.send(torch.ones(1, 4), 1)  # named
    elif rank == 1:
        dist.recv(torch.empty((4, 1) if wrong else (1, 4)), 0)  # named


@wrong(_KIND, "tensor-with-gaps", on_gloo="")
def reduces_a_column(rank: int, wrong: bool) -> None:
    """Other elements than the column's are added up; right: a column of one element has no gaps."""
    matrix = torch.ones(4, 4)
    column = matrix[:, 1] if wrong else matrix[1:2, 1]
    dist.all_reduce(column)  # named


@wrong(_KIND, "tensor-with-gaps", on_gloo="")
def broadcasts_every_second_element(rank: int, wrong: bool) -> None:
    """The right twin gathers them, which gloo does element by element."""
    tensor = torch.ones(8)
    if wrong:
        dist.broadcast(tensor[::2], 0)  # named
    else:
        dist.all_gather([torch.empty(4) for _ in range(WORLD)], tensor[::2])


@wrong(_KIND, "overlapping-outputs", on_gloo="")
def gathers_into_one_tensor_for_all(rank: int, wrong: bool) -> None:
    """A list that holds one tensor several times."""
    parts = [torch.empty(4)] * WORLD if wrong else [torch.empty(4) for _ in range(WORLD)]
    dist.all_gather(parts, torch.ones(4))  # named


@wrong(_KIND, "overlapping-outputs", on_gloo="")
def parts_that_are_too_long(rank: int, wrong: bool) -> None:
    """Parts of a buffer that reach into the next one."""
    buffer, step = torch.empty(16), 3 if wrong else 4
    parts = [buffer[place * step : place * step + 4] for place in range(WORLD)]
    dist.gather(torch.ones(4), parts if rank == 0 else None, dst=0)  # named
