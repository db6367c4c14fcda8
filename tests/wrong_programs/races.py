"""Receives from any rank, whose result depends on which message comes first: message races."""

import torch
import torch.distributed as dist

from tests.wrong_programs import WORLD, wrong

_KIND = "message race"
_CAUSE = "message-race"


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def takes_the_first_that_comes(rank: int, wrong: bool) -> object:
    """Two ranks send to a third one, which takes from any."""
    received = torch.empty(1)
    if rank in (1, 2):
        dist.send(torch.tensor([float(rank)]), 0)  # named
    elif rank == 0:
        dist.recv(received, None if wrong else 1)  # named
        dist.recv(torch.empty(1), None if wrong else 2)
    return float(received) if rank == 0 else None


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def adds_in_order_of_arrival(rank: int, wrong: bool) -> object:
    """A sum in floating point whose order is that of arrival."""
    total = torch.zeros(1)
    if rank:
        dist.send(torch.tensor([1e8 if rank == 1 else 1.0 * rank]), 0)  # named
        return None
    for other in range(1, WORLD):
        received = torch.empty(1)
        dist.recv(received, None if wrong else other)  # named
        total = total * 0.5 + received
    return float(total)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def takes_the_place_from_the_order(rank: int, wrong: bool) -> object:
    """Puts parts together in the order in which they come, not by their sender."""
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)  # named
        return None
    parts: list[float] = [0.0] * WORLD
    for place in range(1, WORLD):
        received = torch.empty(1)
        sender = dist.recv(received)  # named
        parts[place if wrong else sender] = float(received)
    return parts


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def two_kinds_with_one_tag(rank: int, wrong: bool) -> object:
    """Losses of one rank and counts of another one come with the same tag."""
    if rank in (1, 2):
        dist.send(torch.tensor([10.0 * rank]), 3, tag=5 if wrong else rank)  # named
        return None
    if rank != 3:
        return None
    loss, count = torch.empty(1), torch.empty(1)
    dist.recv(loss, tag=5 if wrong else 1)  # named
    dist.recv(count, tag=5 if wrong else 2)
    return float(loss), float(count)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def stops_at_the_first_answer(rank: int, wrong: bool) -> object:
    """A search that keeps the first answer, and drains the others."""
    if rank:
        dist.send(torch.tensor([float(rank * rank)]), 0)  # named
        return None
    answers = []
    for _ in range(1, WORLD):
        received = torch.empty(1)
        dist.recv(received)  # named
        answers.append(float(received))
    return answers[0] if wrong else min(answers)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def loses_an_update(rank: int, wrong: bool) -> object:
    """A server of one number: workers read it, and write back one more; right: they send what is to
    be added, so that every order comes to the same sum.
    """
    if rank == 0:
        value, message = 1.0, torch.empty(2)
        for _ in range((2 if wrong else 1) * (WORLD - 1)):
            sender = dist.recv(message)  # named
            reads, given = (float(one) for one in message)
            if reads:
                dist.send(torch.tensor([value]), sender)
            else:
                value = given if wrong else value + given
        return value
    read = torch.zeros(1)
    if wrong:
        dist.send(torch.tensor([1.0, 0.0]), 0)
        dist.recv(read, 0)
    dist.send(torch.tensor([0.0, float(read) * 2 + rank]), 0)
    return None


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def waits_for_whom_it_has_heard(rank: int, wrong: bool) -> object:
    """Takes the first message from any rank, and the second from rank 2: it waits for ever where
    that one has come first.
    """
    if rank in (1, 2):
        dist.send(torch.tensor([float(rank)]), 0)  # named
    elif rank == 0:
        first, second = torch.empty(1), torch.empty(1)
        sender = dist.recv(first)  # named
        dist.recv(second, 2 if wrong else 3 - sender)
        return float(first + second)
    return None
