"""Input values that expose an incorrect backend, and their exact reductions.

The values follow nccl-tests' `verifiable`: each input and each partial sum, in any order, is exact
in its dtype. The expected result is therefore known exactly, without running a backend. Values
differ between ranks and between neighboring positions, which exposes a dropped, duplicated or
swapped rank and a shifted chunk. A salt changes all values from call to call, which exposes the
result of an earlier call.

This module does not import torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distcheck.machine.numerics import unit_roundoff

Value = bool | int | float | complex
MOST_RANKS = 8  # beyond it the sums exceed uint8 and bfloat16
# Values that no result has, but bfloat16 represents: sums end at 250 x scale, products at 144.
UNTOUCHED, AROUND = 251, 253

_LARGEST_SUM = 250  # below 2**8: uint8, and bfloat16's eight significant bits
_FACTORS = 6  # ranks that multiply by more than 1; 9 * 2**4 = 144 also fits uint8


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """Range of the integers that a dtype represents exactly.

    Sums and products below 2**8 are multiplied by `scale`, so that they lose bits if a backend
    reduces them in lower precision. `roundoff` is the unit roundoff, 0.0 for exact arithmetic.
    """

    name: str
    short: str
    scale: int
    signed: bool = True
    roundoff: float = 0.0

    @property
    def floating(self) -> bool:
        """True if means are defined for this dtype."""
        return self.roundoff > 0


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype(name="float32", short="f32", scale=(1 << 12) + 1, roundoff=unit_roundoff("float32")),
        Dtype(name="float64", short="f64", scale=(1 << 30) + 1, roundoff=unit_roundoff("float64")),
        Dtype(name="bfloat16", short="bf16", scale=1, roundoff=unit_roundoff("bfloat16")),
        Dtype(name="float16", short="f16", scale=7, roundoff=unit_roundoff("float16")),
        Dtype(name="int32", short="i32", scale=(1 << 23) - 1),
        Dtype(name="int64", short="i64", scale=(1 << 54) + 1),
        Dtype(name="uint8", short="u8", scale=1, signed=False),
        Dtype(name="bool", short="bool", scale=1, signed=False),
        Dtype(
            name="complex64", short="c64", scale=(1 << 12) + 1, roundoff=unit_roundoff("complex64")
        ),
    )
}
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")


def is_meaningful(reduction: str, dtype: str) -> bool:
    """Return False for a reduction that is undefined for the dtype: MIN and MAX of complex numbers,
    AVG of integers.
    """
    if reduction in ("MIN", "MAX"):
        return dtype != "complex64"
    return reduction != "AVG" or DTYPES[dtype].floating


def contribution_of_rank(dtype: str, *, rank: int, position: int, salt: int, world: int) -> Value:
    """Return the value that `rank` contributes at `position` to a sum, a minimum, a maximum or a
    mean.

    At each position, consecutive magnitudes differ by `step`. The ranks' order rotates with the
    position, so every rank has the minimum and the maximum somewhere. The sign is the same on all
    ranks.
    """
    if dtype == "bool":
        return _bit(rank, position, salt, world)
    about = DTYPES[dtype]
    most = _LARGEST_SUM // world
    step = max(1, most // (2 * world))
    number = 1 + (rank + position) % world * step
    number += (3 * position + 7 * salt) % (most - world * step)
    sign = _sign(about, position, salt, world)
    if dtype == "complex64":
        return complex(sign * number * about.scale, sign * (number + 1) * 31)
    return sign * number * about.scale


def product_contribution(dtype: str, *, rank: int, position: int, salt: int, world: int) -> Value:
    """Return the value that `rank` contributes at `position` to a product: 3, 2 or 1 in turn."""
    if dtype == "bool":
        return _bit(rank, position, salt, world)
    about = DTYPES[dtype]
    distance = (rank - position - salt) % world
    three = distance == 0 or (distance == 1 and (position // world + salt) % 2 == 1)
    number = 3 if three else 2 if distance < _FACTORS else 1
    first = distance == 0
    scale = about.scale if first else 1
    sign = _sign(about, position, salt, world) if first else 1
    if dtype == "complex64":
        return complex(sign * number * scale, number - 1)
    return sign * number * scale


def reduce_values(reduction: str, values: Sequence[Value]) -> Value:
    """Return the exact reduction of the ranks' values. A mean is rounded to float64.

    For bool, torch computes "any" for a sum or a maximum, and "all" for a product or a minimum.
    """
    if isinstance(values[0], bool):
        return any(values) if reduction in ("SUM", "MAX") else all(values)
    if reduction == "MIN":
        return min(values)  # type: ignore[type-var]
    if reduction == "MAX":
        return max(values)  # type: ignore[type-var]
    if reduction == "PRODUCT":
        return math.prod(values)
    total = sum(values)
    return total if reduction == "SUM" else total / len(values)


def mean_bound(dtype: str, expected: Value, world: int) -> float:
    """Return the error bound of a correct AVG.

    Derived: all terms have the same sign. If the backend divides first, each term is rounded twice
    (u for the reciprocal of the divisor, u for the product), and the additions round W - 1 times.
    Dividing last rounds less. `expected` itself was rounded to float64, which adds at most one u.
    To first order, the sum is (W + 2) u times the mean; the factor 1.01 covers products of
    roundoffs. For a complex mean the bound applies to the magnitude, because the terms of each part
    have the same sign as well.
    """
    return 1.01 * (world + 2) * DTYPES[dtype].roundoff * abs(expected)


def _sign(dtype: Dtype, position: int, salt: int, world: int) -> int:
    """Return the sign at a position. Within `world` consecutive positions, every rank has the
    minimum once.
    """
    return -1 if dtype.signed and (position // world + salt) % 3 == 1 else 1


def _bit(rank: int, position: int, salt: int, world: int) -> bool:
    """Return the bool that a rank contributes at a position. The positions form groups of four: the
    value is True on one rank only, False on one rank only, equal on all ranks, or pseudorandom. So
    every rank decides "any" and "all" both ways.
    """
    turn, kind = divmod(position + salt, 4)
    if kind < 2:
        return (turn % world == rank) != (kind == 1)
    mixed = (
        (rank if kind == 3 else 0) * 7919 + position * 104729 + salt * 1299709 + 12345
    ) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 7)) * 0x9E3779B1) & 0xFFFFFFFF
    return bool((mixed >> 15) & 1)
