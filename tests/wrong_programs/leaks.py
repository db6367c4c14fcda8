"""Groups that are made again and again, and never destroyed. Results are right all the same."""

from typing import Any

import torch
import torch.distributed as dist

from tests.wrong_programs import ODD, WORLD, wrong

_KIND = "resource leak"
_CAUSE = "groups-not-destroyed"
_STEPS = 4


@wrong(_KIND, _CAUSE, on_gloo="")
def a_group_in_every_step(rank: int, wrong: bool) -> None:
    """The right twin makes it at set-up, and one for each of several layers."""
    groups = [] if wrong else [dist.new_group(list(range(WORLD))) for _ in range(_STEPS)]
    for _ in range(_STEPS):
        if wrong:
            groups = [dist.new_group(list(range(WORLD)))]  # named
        for group in groups:
            dist.all_reduce(torch.ones(3), group=group)


@wrong(_KIND, _CAUSE, on_gloo="")
def a_group_of_some_in_every_step(rank: int, wrong: bool) -> None:
    """The right twin destroys it."""
    for _ in range(_STEPS):
        group = dist.new_group([0, ODD])  # named
        if rank in (0, ODD):
            dist.broadcast(torch.ones(3), 0, group=group)
            if not wrong:
                dist.destroy_process_group(group)


@wrong(_KIND, _CAUSE, on_gloo="")
def destroys_on_one_rank_only(rank: int, wrong: bool) -> None:
    """Only the root destroys its end of the group."""
    for _ in range(_STEPS):
        group = dist.new_group([0, 1, 2, 3])  # named
        dist.all_reduce(torch.ones(3), group=group)
        if rank == 0 or not wrong:
            dist.destroy_process_group(group)


@wrong(_KIND, _CAUSE, on_gloo="")
def destroys_one_of_two(rank: int, wrong: bool) -> None:
    """Of two groups of each step, one is destroyed."""
    for _ in range(_STEPS):
        first = dist.new_group([0, 1, 2, 3])
        second = dist.new_group([0, 1, 2, 3])  # named
        for group in (first, second):
            dist.all_reduce(torch.ones(3), group=group)
        for group in (first,) if wrong else (first, second):
            dist.destroy_process_group(group)


@wrong(_KIND, _CAUSE, on_gloo="")
def subgroups_in_every_step(rank: int, wrong: bool) -> None:
    """torch makes several groups at once; the right twin keeps its own."""
    own: Any = None
    for _ in range(_STEPS):
        if own is None or wrong:
            own, _ = dist.new_subgroups(2)  # named
        dist.all_reduce(torch.ones(3), group=own)


@wrong(_KIND, _CAUSE, on_gloo="")
def keeps_the_groups_in_a_list(rank: int, wrong: bool) -> None:
    """The right twin uses all of them at the end."""
    groups = []
    for _ in range(_STEPS):
        groups.append(dist.new_group([0, 1, 2, 3]))  # named
        dist.barrier(groups[-1])
    for group in groups if not wrong else groups[-1:]:
        dist.barrier(group)
