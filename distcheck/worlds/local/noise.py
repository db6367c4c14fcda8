"""Memory that is allocated first, so that what comes later lies at other addresses.

Ranks that are forked from one process allocate alike, and so their objects have the same `id()`.
Ranks on different machines do not. CPython takes small objects from pools of one size class each
(16 to 512 bytes, by 16), and gives out what was freed last; larger ones come from malloc. So a
random number of blocks of every class is taken, and half of them freed in a random order.
"""

import random
import sys

_SMALL = range(16, 513, 16)  # size classes of CPython's allocator
_LARGE = (600, 1500, 4000, 20_000, 70_000)
_MOST_SMALL, _MOST_LARGE = 200, 12
_HEADER = sys.getsizeof(b"")

_kept: list[bytes] = []


def allocate(seed: int) -> None:
    """Takes about 1 MB, at most 3, and gives half of it back; the rest is kept until the end."""
    drawn = random.Random(seed)
    taken: list[bytes | None] = []
    for sizes, most in ((_SMALL, _MOST_SMALL), (_LARGE, _MOST_LARGE)):
        for size in sizes:
            taken += [bytes(max(1, size - _HEADER)) for _ in range(drawn.randint(1, most))]
    places = list(range(len(taken)))
    drawn.shuffle(places)
    for place in places[: len(places) // 2]:
        taken[place] = None
    _kept.extend(one for one in taken if one is not None)
