"""Groups that ranks make or use in different ways."""

import torch
import torch.distributed as dist

from tests.wrong_programs import ODD, wrong

_KIND = "groups"


@wrong(_KIND, "collective-mismatch", on_gloo="")
def groups_with_other_members(rank: int, wrong: bool) -> None:
    """One rank takes other ranks for the members of a group."""
    group = dist.new_group([1, 2] if rank == ODD and wrong else [0, 1, 2])  # named
    if dist.get_rank(group) >= 0:
        dist.all_reduce(torch.ones(3), group=group)


@wrong(_KIND, "collective-mismatch", on_gloo="")
def groups_made_in_another_order(rank: int, wrong: bool) -> None:
    """One rank makes two groups in another order."""
    members = [[0, 1, 2], [1, 2, 3]]
    groups = [
        dist.new_group(ranks)  # named
        for ranks in (reversed(members) if rank == ODD and wrong else members)
    ]
    for group in reversed(groups) if rank == ODD and wrong else groups:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(torch.ones(3), group=group)


@wrong(_KIND, "collective-mismatch", on_gloo="")
def only_members_make_the_group(rank: int, wrong: bool) -> None:
    """Ranks outside of the first group do not make it, so that their next one has its name."""
    if rank < 2 or not wrong:
        first = dist.new_group([0, 1])  # named
    second = dist.new_group([0, 1, 2, 3])  # named
    dist.all_reduce(torch.ones(3), group=second)
    if rank < 2:
        dist.all_reduce(torch.ones(3), group=first)


@wrong(_KIND, "hang")
def other_group(rank: int, wrong: bool) -> None:
    """One rank reduces in the world what the others reduce in a group of all."""
    group = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(torch.ones(3), group=None if rank == ODD and wrong else group)  # named


@wrong(_KIND, "crash", on_gloo="")
def uses_a_destroyed_group(rank: int, wrong: bool) -> None:
    """Reduces in a group that is gone."""
    group = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(torch.ones(3), group=group)
    if wrong:
        dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(3), group=group)  # named


@wrong(_KIND, "crash", on_gloo="crash")
def root_outside_of_the_group(rank: int, wrong: bool) -> None:
    """Broadcasts in a group from a rank that is none of its own."""
    group = dist.new_group([1, 2, 3])
    if rank:
        dist.broadcast(torch.ones(3), 0 if wrong else 1, group=group)  # named


@wrong(_KIND, "collective-mismatch", on_mpi="")
def takes_the_place_for_the_rank(rank: int, wrong: bool) -> None:
    """One rank gives the root's place in the group where its rank in the world is meant."""
    group = dist.new_group([1, 2, 3])
    if rank:
        dist.broadcast(torch.ones(3), 1 if rank != ODD or not wrong else 2, group=group)  # named
