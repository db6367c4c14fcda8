"""Makes ranks differ in more than their rank, as ranks on several machines do.

`together`  every rank is forked from one interpreter, has the same environment, and is not delayed
`separate`  ranks differ in all FACTORS

 delays        each rank sleeps for some milliseconds, before backward and before a collective
 memory        each rank first allocates and frees memory, so that objects have other addresses
 nodes         LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK have values as on several machines
 environment   each rank has its environment variables in another order
 interpreters  ranks are forked from interpreters with different hash seeds and addresses
"""

import random
import sys

import msgspec

from distcheck.machine.seeds import derive
from distcheck.records import Delay
from distcheck.records.run_facts import SEPARATELY

# The factor that locates a line most exactly comes first: the factors of a rerun that differs are
# bisected in this order.
FACTORS = ("delays", "memory", "nodes", "environment", "interpreters")

# PYTHONHASHSEED of the helper, and of each further interpreter. Two random seeds give a set of two
# strings the same order half of the time. Measured: these two differ for 19 of the 20 pairs in
# tests/unit/test_surroundings.py, such as "weight" and "bias".
HASH_SEED = 0
HASH_SEEDS = (106, 148)

_MOST_BACKWARD_MS, _MOST_COLLECTIVE_MS = 3, 4
_EARLY_COLLECTIVES = 3  # of a step, one of which a rank enters late
# Sizes that `allocate` uses.
_SMALL = range(16, 513, 16)  # size classes of CPython's allocator
_LARGE = (600, 1500, 4000, 20_000, 70_000)
_MOST_SMALL, _MOST_LARGE = 200, 12
_HEADER = sys.getsizeof(b"")

_allocated: list[bytes] = []


class Surroundings(msgspec.Struct, frozen=True):
    """Factors that differ between ranks, and a seed that determines each rank's values."""

    factors: tuple[str, ...] = ()
    seed: int = 0
    schedule: str = ""  # of a simulated world, in the format of `records/schedules.py`

    def nodes_of(self, world: int) -> int:
        """Return the number of machines on which `world` ranks claim to run: the smallest number
        above one that divides the world size.
        """
        if "nodes" not in self.factors:
            return 1
        return next((n for n in range(2, world + 1) if world % n == 0), 1)

    def interpreter_of(self, rank: int) -> int | None:
        """Return the number of the further interpreter that forks a rank; None for the helper.

        It is the parity of the number of ones in the binary representation of the rank. Neighbors
        differ, and so do the two ranks of a group whose stride is a power of two.
        """
        return rank.bit_count() % len(HASH_SEEDS) if "interpreters" in self.factors else None

    def order_seed(self, rank: int) -> int | None:
        """Return the seed for the order of a rank's environment variables; None keeps the order."""
        return derive(self.seed, "environment", rank) if "environment" in self.factors else None

    def memory_seed(self, rank: int) -> int | None:
        """Return the seed for a rank's early allocations; None makes no allocations."""
        return derive(self.seed, "memory", rank) if "memory" in self.factors else None

    def delays(self, world: int) -> tuple[Delay, ...]:
        """Return one delay for each rank before backward, and one before an early collective."""
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
            parts.append("different memory addresses")
        if "environment" in self.factors:
            parts.append("a different order of the environment")
        if "delays" in self.factors:
            most = _MOST_BACKWARD_MS + _MOST_COLLECTIVE_MS
            parts.append(f"ranks up to {most} ms delayed")
        where = SEPARATELY if "interpreters" in self.factors else "in one process"
        return f"{where}: {', '.join(parts)}"


TOGETHER = Surroundings()


def separate(seed: int, *, delayed: bool, in_one_process: bool = False) -> Surroundings:
    """Return surroundings in which ranks differ in all factors; in delays only if `delayed`. With
    `in_one_process`, ranks share an interpreter and its memory.
    """
    left_out = [] if delayed else ["delays"]
    left_out += ["memory", "interpreters"] if in_one_process else []
    return Surroundings(tuple(name for name in FACTORS if name not in left_out), seed)


def allocate(seed: int) -> None:
    """Allocate about 1 MB, at most 3, and free half of it. The rest is kept until the process ends.

    Ranks forked from one process allocate identically, so their objects have the same `id()`; ranks
    on different machines do not. CPython takes small objects from pools of one size class each (16
    to 512 bytes, in steps of 16), and reuses the block that was freed last; larger objects come
    from malloc. This function therefore allocates a random number of blocks of every class, and
    frees half of them in a random order.
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
