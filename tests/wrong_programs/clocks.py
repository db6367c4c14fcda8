"""Results that depend on what no schedule controls; right: it does not reach the result."""

import os
import threading
import time
import uuid

import torch
import torch.distributed as dist

from tests.wrong_programs import wrong

_KIND = "nondeterminism"
_CAUSE = "nondeterministic"


def _summed(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def adds_the_time(rank: int, wrong: bool) -> object:
    """The time is a seed; right: it is only logged."""
    now = time.time()
    print(now)
    return _summed(now if wrong else rank)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def measures_itself(rank: int, wrong: bool) -> object:
    """A duration decides how much is done."""
    begun = time.perf_counter_ns()
    value = _summed(rank)
    spent = time.perf_counter_ns() - begun
    return value, spent % 1000 if wrong else spent >= 0


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def draws_from_the_system(rank: int, wrong: bool) -> object:
    """A seed of the system's random numbers; right: the name of a file nobody reads."""
    drawn = int.from_bytes(os.urandom(4), "little")
    return _summed(drawn if wrong else 1.0)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def identifies_itself_by_chance(rank: int, wrong: bool) -> object:
    """A random UUID; right: one that follows from the rank."""
    own = uuid.uuid4() if wrong else uuid.UUID(int=rank)
    return _summed(own.int % 1000), str(own)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def seeds_torch_by_chance(rank: int, wrong: bool) -> object:
    """`torch.seed()` takes a seed from the system; `torch.manual_seed` does not."""
    torch.seed() if wrong else torch.manual_seed(rank)
    return _summed(float(torch.rand(1)))


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def knows_its_process(rank: int, wrong: bool) -> object:
    """The number of its process; right: whether it has one."""
    return _summed(os.getpid() if wrong else os.getpid() > 0)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def reads_what_a_thread_counts(rank: int, wrong: bool) -> object:
    """A thread counts on; right: it is joined before its count is read."""
    counted = [0]
    over = threading.Event()

    def count() -> None:
        while not over.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass
    over.set()
    thread.join()
    return _summed(counted[0] if wrong else counted[0] >= 0)
