"""Arguments that are wrong by themselves: torch or the backend refuses them on the rank."""

import torch
import torch.distributed as dist

from tests.wrong_programs import ODD, WORLD, wrong

_KIND = "invalid parameter"
_CAUSE = "crash"


@wrong(_KIND, _CAUSE)
def root_out_of_range(rank: int, wrong: bool) -> None:
    """A root that is no rank of the world."""
    dist.broadcast(torch.ones(4), WORLD if wrong else WORLD - 1)  # named


@wrong(_KIND, _CAUSE)
def too_few_parts(rank: int, wrong: bool) -> None:
    """A list that is shorter than the world."""
    parts = [torch.empty(4) for _ in range(WORLD - wrong)]
    dist.all_gather(parts, torch.ones(4))  # named


@wrong(_KIND, _CAUSE)
def splits_that_do_not_add_up(rank: int, wrong: bool) -> None:
    """Splits of more rows than there are."""
    splits = [1, 1, 1, 2 if wrong else 1]
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [1] * 4, splits)  # named


@wrong(_KIND, _CAUSE)
def part_of_another_size(rank: int, wrong: bool) -> None:
    """An output that does not hold a part of the input."""
    dist.reduce_scatter_tensor(torch.empty(3 if wrong else 2), torch.ones(8))  # named


@wrong(_KIND, _CAUSE)
def sends_to_itself(rank: int, wrong: bool) -> None:
    """A rank that sends to itself."""
    if rank == ODD and wrong:
        dist.send(torch.ones(4), rank)  # named


@wrong(_KIND, _CAUSE, on_mpi="")
def a_tensor_with_gaps(rank: int, wrong: bool) -> None:
    """A message that is a column of a matrix."""
    matrix = torch.ones(4, 4)
    if rank == 0:
        dist.send(matrix[:, 1] if wrong else matrix[1], 1)  # named
    elif rank == 1:
        dist.recv(torch.empty(4), 0)


@wrong(_KIND, _CAUSE)
def no_tensor(rank: int, wrong: bool) -> None:
    """A number in place of a tensor."""
    tensor = torch.ones(1)
    dist.all_reduce(1.0 if wrong else tensor)  # type: ignore[arg-type]  # named
