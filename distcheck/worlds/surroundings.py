"""What differs between the ranks of a world beside their rank, as it does between machines.

`together`  every rank is forked from one interpreter, has the same environment, and is not delayed
`separate`  ranks differ in every one of FACTORS

    delays        each rank sleeps for some milliseconds, before backward and before a collective
    memory        each rank allocates and frees first, so that its objects lie at other addresses
    nodes         LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK as on several machines
    environment   each rank has its environment variables in another order
    interpreters  ranks are forked from interpreters with hash seeds and addresses of their own
"""

import random
import sys

import msgspec

from distcheck.machine.seeds import derive
from distcheck.records import Delay
from distcheck.records.run_facts import SEPARATELY

# What points at a line most exactly comes first: a rerun that differs is taken apart in this order.
FACTORS = ("delays", "memory", "nodes", "environment", "interpreters")

# PYTHONHASHSEED of the helper, and of each further interpreter. Two random seeds give a set of two
# strings the same order half of the time. These two differ for 19 of the 20 pairs in
# tests/unit/test_surroundings.py, such as "weight" and "bias".
HASH_SEED = 0
HASH_SEEDS = (106, 148)

_MOST_BACKWARD_MS, _MOST_COLLECTIVE_MS = 3, 4
_EARLY_COLLECTIVES = 3  # of a step, before one of which a rank is late
# Sizes that `allocate` takes.
_SMALL = range(16, 513, 16)  # size classes of CPython's allocator
_LARGE = (600, 1500, 4000, 20_000, 70_000)
_MOST_SMALL, _MOST_LARGE = 200, 12
_HEADER = sys.getsizeof(b"")

_allocated: list[bytes] = []


class Surroundings(msgspec.Struct, frozen=True):
    """Which factors differ between ranks, and the seed from which each rank's are derived."""

    factors: tuple[str, ...] = ()
    seed: int = 0
    schedule: str = ""  # of a simulated world, as `records/schedules.py` has it

    def nodes_of(self, world: int) -> int:
        """The machines that `world` ranks are said to be on: the fewest, more than one, that have
        the same number of ranks each, as launchers start them.
        """
        if "nodes" not in self.factors:
            return 1
        return next((n for n in range(2, world + 1) if world % n == 0), 1)

    def interpreter_of(self, rank: int) -> int | None:
        """The further interpreter that a rank is forked from; None: the helper.

        By the parity of the ones in the rank's binary digits: neighbors differ, and so do the two
        ranks of a group with any power of two as its stride.
        """
        return rank.bit_count() % len(HASH_SEEDS) if "interpreters" in self.factors else None

    def order_seed(self, rank: int) -> int | None:
        """The seed of the order of a rank's environment variables; None: the front's order."""
        return derive(self.seed, "environment", rank) if "environment" in self.factors else None

    def memory_seed(self, rank: int) -> int | None:
        """The seed of what a rank allocates before code under test is loaded; None: nothing."""
        return derive(self.seed, "memory", rank) if "memory" in self.factors else None

    def delays(self, world: int) -> tuple[Delay, ...]:
        """For each rank one before backward and one before an early collective of every step."""
        if "delays" not in self.factors:
            return ()
        found = []
        for rank in range(world):
            drawn = random.Random(derive(self.seed, "lateness", rank))
            collective = drawn.randint(1, _EARLY_COLLECTIVES)
            found += [
                Delay(rank=rank, ms=drawn.randint(1, _MOST_BACKWARD_MS)),
                Delay(rank=rank, collective=collective, ms=drawn.randint(1, _MOST_COLLECTIVE_MS)),
            ]
        return tuple(found)

    def describe(self, world: int) -> str:
        parts = []
        if "interpreters" in self.factors:
            seeds = " and ".join(map(str, HASH_SEEDS[:world]))
            parts.append(f"hash seed{'s' * (world > 1)} {seeds} (first world: {HASH_SEED})")
        nodes = self.nodes_of(world)
        if nodes > 1:
            local = world // nodes
            parts.append(f"LOCAL_RANK as on {nodes} machines with {local} rank{'s' * (local > 1)}")
        if "memory" in self.factors:
            parts.append("other addresses")
        if "environment" in self.factors:
            parts.append("another order of the environment")
        if "delays" in self.factors:
            most = _MOST_BACKWARD_MS + _MOST_COLLECTIVE_MS
            parts.append(f"ranks up to {most} ms late")
        where = SEPARATELY if "interpreters" in self.factors else "in one process"
        return f"{where}: {', '.join(parts)}"


TOGETHER = Surroundings()


def separate(seed: int, *, delayed: bool, in_one_process: bool = False) -> Surroundings:
    """All factors; `delayed` says whether the delays are among them. Ranks `in_one_process` share
    an interpreter and its memory.
    """
    left_out = [] if delayed else ["delays"]
    left_out += ["memory", "interpreters"] if in_one_process else []
    return Surroundings(tuple(name for name in FACTORS if name not in left_out), seed)


def allocate(seed: int) -> None:
    """Takes about 1 MB, at most 3, and gives half of it back; the rest is kept until the end.

    Ranks that are forked from one process allocate alike, and so their objects have the same
    `id()`. Ranks on different machines do not. CPython takes small objects from pools of one size
    class each (16 to 512 bytes, by 16), and gives out what was freed last; larger ones come from
    malloc. So a random number of blocks of every class is taken, and half of them freed in a random
    order.
    """
    drawn = random.Random(seed)
    taken: list[bytes | None] = []
    for sizes, most in ((_SMALL, _MOST_SMALL), (_LARGE, _MOST_LARGE)):
        for size in sizes:
            taken += [bytes(max(1, size - _HEADER)) for _ in range(drawn.randint(1, most))]
    places = list(range(len(taken)))
    drawn.shuffle(places)
    for place in places[: len(places) // 2]:
        taken[place] = None
    _allocated.extend(one for one in taken if one is not None)
