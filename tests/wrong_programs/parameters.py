"""Calls that all ranks make, with arguments that do not match."""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.wrong_programs import ODD, late, wrong

_KIND = "parameter matching"
_CAUSE = "collective-mismatch"


@wrong(_KIND, _CAUSE)
def other_operation(rank: int, wrong: bool) -> None:
    """One rank broadcasts."""
    late(rank, wrong)
    if rank == ODD and wrong:
        dist.broadcast(torch.ones(64), ODD)  # named
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(64))  # named


@wrong(_KIND, _CAUSE)
def other_root(rank: int, wrong: bool) -> None:
    """One rank takes another one for the root."""
    late(rank, wrong)
    dist.broadcast(torch.ones(64), 3 if rank == 0 and wrong else 0)  # named
    dist.reduce(torch.ones(64), 3 if rank == 0 and wrong else 0)


@wrong(_KIND, _CAUSE, on_mpi="")
def other_root_of_a_reduction(rank: int, wrong: bool) -> None:
    """One rank reduces to another one, and all meet afterwards."""
    dist.reduce(torch.ones(64), 1 if rank == ODD and wrong else 0)  # named
    dist.barrier()


@wrong(_KIND, _CAUSE, on_mpi="")
def every_rank_its_own_root(rank: int, wrong: bool) -> None:
    """Every rank broadcasts from itself."""
    dist.broadcast(torch.ones(8), rank if wrong else 0)  # named


@wrong(_KIND, _CAUSE)
def other_root_of_a_gather(rank: int, wrong: bool) -> None:
    """One rank gathers at another one."""
    root = 1 if rank == ODD and wrong else 0
    parts = [torch.empty(4) for _ in range(4)] if rank == root else None
    dist.gather(torch.ones(4), parts, root)  # named


@wrong(_KIND, _CAUSE)
def other_root_of_a_scatter(rank: int, wrong: bool) -> None:
    """One rank takes its part from another one."""
    root = 3 if rank == ODD and wrong else 0
    parts = [torch.ones(4) for _ in range(4)] if rank == root else None
    dist.scatter(torch.empty(4), parts, root)  # named


@wrong(_KIND, _CAUSE)
def other_shape(rank: int, wrong: bool) -> None:
    """One rank gathers more."""
    late(rank, wrong)
    size = 5 if rank == ODD and wrong else 4
    dist.all_gather([torch.ones(size) for _ in range(4)], torch.ones(size))  # named


@wrong(_KIND, _CAUSE)
def other_number_of_elements(rank: int, wrong: bool) -> None:
    """One rank reduces fewer."""
    dist.all_reduce(torch.ones(63 if rank == ODD and wrong else 64))  # named


@wrong(_KIND, _CAUSE, on_gloo="")
def other_dtype(rank: int, wrong: bool) -> None:
    """One rank reduces doubles, half as many: as many bytes."""
    double = rank == ODD and wrong
    tensor = torch.ones(32, dtype=torch.float64) if double else torch.ones(64)
    dist.all_reduce(tensor)  # named


@wrong(_KIND, _CAUSE)
def other_dtype_and_bytes(rank: int, wrong: bool) -> None:
    """One rank reduces doubles."""
    late(rank, wrong)
    dtype = torch.float64 if rank == ODD and wrong else torch.float32
    dist.all_reduce(torch.ones(64, dtype=dtype))  # named


@wrong(_KIND, _CAUSE, on_gloo="")
def half_in_place_of_bfloat16(rank: int, wrong: bool) -> None:
    """One rank reduces in another format of as many bytes."""
    dtype = torch.float16 if rank == ODD and wrong else torch.bfloat16
    dist.all_reduce(torch.ones(64, dtype=dtype))  # named


@wrong(_KIND, _CAUSE, on_gloo="")
def other_reduce_operation(rank: int, wrong: bool) -> None:
    """One rank takes the maximum."""
    op = ReduceOp.MAX if rank == ODD and wrong else ReduceOp.SUM
    dist.all_reduce(torch.ones(64), op)  # named


@wrong(_KIND, _CAUSE, on_gloo="")
def other_reduce_operation_of_parts(rank: int, wrong: bool) -> None:
    """One rank takes the product of the parts."""
    op = ReduceOp.PRODUCT if rank == ODD and wrong else ReduceOp.SUM
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8), op)  # named


@wrong(_KIND, _CAUSE, on_gloo="")
def other_splits(rank: int, wrong: bool) -> None:
    """One rank expects more rows of the first than it sends."""
    splits = [2, 1, 1, 1] if rank == ODD and wrong else [1, 1, 1, 1]
    received = torch.empty(sum(splits))
    dist.all_to_all_single(received, torch.ones(4), output_split_sizes=splits)  # named


@wrong(_KIND, _CAUSE, on_gloo="crash", on_mpi=_CAUSE)
def other_sizes_of_a_list(rank: int, wrong: bool) -> None:
    """One rank sends more to the first than that expects."""
    sent = [torch.ones(2) for _ in range(4)]
    if rank == ODD and wrong:
        sent[0] = torch.ones(3)
    received = [torch.empty(2) for _ in range(4)]
    dist.all_to_all(received, sent)  # named


@wrong(_KIND, _CAUSE)
def message_of_another_size(rank: int, wrong: bool) -> None:
    """A rank sends more than is received."""
    if rank == ODD:
        dist.send(torch.ones(4 if wrong else 3), 1)  # named
    elif rank == 1:
        dist.recv(torch.ones(3), ODD)  # named


@wrong(_KIND, _CAUSE, on_gloo="")
def message_of_another_dtype(rank: int, wrong: bool) -> None:
    """A rank sends integers where floats are received: as many bytes."""
    if rank == ODD:
        dist.send(torch.ones(4, dtype=torch.int32 if wrong else torch.float32), 1)  # named
    elif rank == 1:
        dist.recv(torch.ones(4), ODD)  # named


@wrong(_KIND, _CAUSE)
def sends_unreceived(rank: int, wrong: bool) -> None:
    """A send that is received with another tag."""
    late(rank, wrong)
    if rank == ODD:
        dist.send(torch.ones(1 << 20), 1, tag=7)  # named
    elif rank == 1:
        dist.recv(torch.empty(1 << 20), ODD, tag=8 if wrong else 7)  # named


@wrong(_KIND, _CAUSE)
def half_and_half(rank: int, wrong: bool) -> None:
    """Half of the ranks reduce more: it is not known which are wrong."""
    dist.all_reduce(torch.ones(4 if wrong and rank % 2 else 3))  # named


@wrong(_KIND, _CAUSE)
def gathers_in_place_of_scattering(rank: int, wrong: bool) -> None:
    """One rank gathers parts where the others reduce them."""
    if rank == ODD and wrong:
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(2))  # named
    else:
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8))  # named
