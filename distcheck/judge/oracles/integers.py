"""Workload `exact` in closed form, in Python integers: no tensors, no autograd. Does not import
torch.

Nothing here is shared with `distcheck.workloads.exact` or the training loop: sizes, data, weights,
gradients and updates are implemented a second time, by hand. With cotangents c and features x, one
sample contributes to the gradient of

    dense     c_h [z_h > 0] x          z = A x + b
    head      c_o max(x, 0)
    conv      c_k sum over patches [conv_k(patch) > 0] patch
    scale     c
    table     c pattern

Let a rank's shard have n = odd * 2^k of the step's N samples. Its loss is N / 2^k times the sum
over its samples, so its gradient is N / 2^k * K with K the sum of those contributions, and the mean
over all samples, weighted by n / N, is the sum over the ranks of odd * K: an integer.

An update with learning rate 2^-6 subtracts that integer from the weights, in units of 2^-6.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from distcheck.contract import Contract

_FEATURES, _HIDDEN, _SIDE, _HEAD_IN, _HEAD_OUT, _KERNELS, _TABLE = 12, 8, 4, 6, 4, 2, 300_007
_UNIT = 64  # weights are integers in units of 2^-6
_LARGEST_CONTRIBUTION = 18  # of one sample to one element: nine patches of pixels up to 2
_SIGNIFICAND_BITS = {"float32": 24, "float64": 53}
_LARGEST_FLOAT16 = 65504
_SHORT = ("bfloat16", "float16")

Vector = list[int]


class HeadroomError(Exception):
    """Raised if a sum may exceed the exact range of the dtype, so that the bits are unknown."""


@dataclass(frozen=True)
class IntegerStep:
    """Exact values of one step, by parameter name; `table` by its period."""

    local: list[dict[str, list[Fraction]]]  # per rank
    synced: dict[str, list[Fraction]]
    after: dict[str, list[Fraction]]
    losses: list[Fraction]  # per rank


def integer_value(row: int, column: int, span: int) -> int:
    """Return the value of sample `row` in `column`; initial weights use it as well."""
    t = (131 * row + 71 * column + 17) % 257
    return t * t % 257 % span - span // 2


def why_not_exact(
    contract: Contract, *, dtype: str, world: int, shard_sizes: Sequence[Sequence[int]]
) -> str:
    """Return the reason that the bits of a correct strategy are not determined, or "".
    `shard_sizes` has, for each step, the ranks' numbers of samples.
    """
    if dtype not in _SIGNIFICAND_BITS:
        return f"{dtype} has too low a precision for exact sums"
    if contract.wire in _SHORT:
        return (
            f"gradients are communicated in {contract.wire}, whose precision is too low for "
            "exact sums"
        )
    if contract.wire is not None:
        dtype = contract.wire  # at most float32, which every exact dtype contains
    grown = 0
    for sizes in shard_sizes:
        total = sum(sizes)
        if len(set(sizes)) > 1 and total & (total - 1):
            return f"{total} samples over {world} ranks have weights that are not exact"
        if not all(_splits_exactly(n, contract.micro_batches) for n in sizes):
            return (
                f"{contract.micro_batches} micro-batches of a shard have shares that are not exact"
            )
        largest = sum(_odd_factor(n) * n for n in sizes) * _LARGEST_CONTRIBUTION
        grown += largest
        if max(largest * world, grown) >= 2 ** _SIGNIFICAND_BITS[dtype]:
            return f"sums over {total} samples in {world} shards may be too large for {dtype}"
    divides = contract.scale in ("divide-after", "divide-before")
    if not divides and not reciprocal_is_exact(world, dtype):
        return f"multiplying by 1/{world} does not invert multiplying by {world} in {dtype}"
    return ""


def why_wire_overflows(contract: Contract, *, shard_sizes: Sequence[Sequence[int]]) -> str:
    """Return the reason that gradients may exceed the range of the contract's wire dtype, or "".
    They would correctly become infinite, and nothing could be judged afterward.
    """
    if contract.wire != "float16":  # the others have float32's range
        return ""
    most = (
        max(len(s) * sum(_odd_factor(n) * n for n in s) for s in shard_sizes)
        * _LARGEST_CONTRIBUTION
    )
    if most <= _LARGEST_FLOAT16:
        return ""
    return f"its gradients may reach {most} and float16 carries {_LARGEST_FLOAT16}"


def _splits_exactly(samples: int, micro_batches: int) -> bool:
    """Return True if micro-batches are equal with a fraction of 1 / 2^k each: their losses and
    gradients times that are exact summands of the shard's.
    """
    return samples % micro_batches == 0 and micro_batches & (micro_batches - 1) == 0


def reciprocal_is_exact(world: int, dtype: str) -> bool:
    """Return True if (world * m) * fl(1 / world) rounds to m for every integer m.

    With fl(1/W) = (1 + d) / W the product is m + m d, which rounds to m if |m d| is below half a
    unit in the last place of m; that unit is at least 2^-bits * |m|, so |d| < 2^-(bits + 1)
    suffices for all m.
    """
    bits = _SIGNIFICAND_BITS[dtype]
    exponent = world.bit_length() - 1 + bits
    scaled = Fraction(2**exponent, world)
    while scaled >= 2**bits:
        scaled, exponent = scaled / 2, exponent - 1
    rounded = Fraction(round(scaled), 2**exponent)
    return abs(rounded * world - 1) <= Fraction(1, 2 ** (bits + 1))


class IntegerOracle:
    """Trains in integers, step by step, on the samples that each rank read."""

    def __init__(self, contract: Contract, dtype: str) -> None:
        self._contract = contract
        self._limit = 2 ** _SIGNIFICAND_BITS[dtype]
        self._weights = {
            name: [_UNIT * w for w in values] for name, values in initial_weights().items()
        }

    def step(
        self, shards: Sequence[Sequence[int]], loss_factors: Sequence[float] | None = None
    ) -> IntegerStep:
        """Advance by one step.

        `shards` are the ranks' sample indices. `loss_factors` are their loss factors, for
        strategies without a promise (default 1). Raises HeadroomError if a sum may exceed the exact
        range.
        """
        world, total = len(shards), sum(map(len, shards))
        sums = [_Contributions(self._weights, ids) for ids in shards]
        odds = [_odd_factor(len(ids)) for ids in shards]
        self._check(sums, odds, world, total)
        synced: dict[str, Vector] = {}
        for name in self._weights:
            columns = [contribution.total[name] for contribution in sums]
            synced[name] = [
                sum(odd * k for odd, k in zip(odds, column, strict=True))
                for column in zip(*columns, strict=True)
            ]
            self._weights[name] = [
                w - g for w, g in zip(self._weights[name], synced[name], strict=True)
            ]
        scales = [Fraction(total * odd, len(ids)) for odd, ids in zip(odds, shards, strict=True)]
        factors = self._loss_factors([len(ids) for ids in shards], loss_factors)
        self._check_factors(sums, scales, factors)
        seen = [scale * factor for scale, factor in zip(scales, factors, strict=True)]
        return IntegerStep(
            local=[
                {name: _map(part, factor.__mul__) for name, part in c.total.items()}
                for factor, c in zip(seen, sums, strict=True)
            ],
            synced={name: _map(part, Fraction) for name, part in synced.items()},
            after={
                name: _map(part, lambda w: Fraction(w, _UNIT))
                for name, part in self._weights.items()
            },
            losses=[scale * c.loss for scale, c in zip(scales, sums, strict=True)],
        )

    def _loss_factors(
        self, sizes: Sequence[int], observed: Sequence[float] | None
    ) -> list[Fraction]:
        if self._contract.weighting == "loss":
            return [Fraction(size * len(sizes), sum(sizes)) for size in sizes]
        if self._contract.observes_loss and observed is not None:
            if not all(map(isfinite, observed)):
                raise HeadroomError("a loss was multiplied by a number that is not finite")
            return [Fraction(factor) for factor in observed]
        return [Fraction(1)] * len(sizes)

    def _check_factors(
        self, sums: "list[_Contributions]", scales: list[Fraction], factors: list[Fraction]
    ) -> None:
        """Raise HeadroomError for inexact factors: a power of two changes only the exponent, any
        other factor uses digits.
        """
        for c, scale, factor in zip(sums, scales, factors, strict=True):
            digits = abs((scale * factor).numerator)
            if digits and _odd_factor(digits) * c.largest >= self._limit:
                raise HeadroomError(f"a loss times {float(factor)} has more digits than are exact")

    def _check(self, sums: "list[_Contributions]", odds: list[int], world: int, total: int) -> None:
        weighted = [odd * world * c.largest for odd, c in zip(odds, sums, strict=True)]
        local = max(_odd_factor(total) * c.largest for c in sums)
        activation = max(c.largest_activation for c in sums)
        weight = max(abs(w) for part in self._weights.values() for w in part)
        for what, value in (
            ("a sum over all ranks", sum(weighted)),
            ("a local gradient", local),
            ("an activation", activation),
            ("a weight", weight),
        ):
            if value >= self._limit:
                raise HeadroomError(f"{what} may reach {value}, more than {self._limit} exactly")


class _Contributions:
    """Contributions of a shard to every gradient, and bounds of their partial sums."""

    def __init__(self, weights: dict[str, Vector], ids: Sequence[int]) -> None:
        self.total = {name: [0] * len(part) for name, part in weights.items()}
        self.loss = 0
        self.largest_activation = 0
        self._sizes = dict.fromkeys(weights, 0)
        self._to_table = 0
        for i in ids:
            self._add(weights, i)
        self._put("table", [self._to_table * p for p in TABLE_PERIOD])  # equal for all samples
        self.largest = max(self._sizes.values())

    def _add(self, weights: dict[str, Vector], i: int) -> None:
        at = 0

        def take(count: int, span: int) -> Vector:
            nonlocal at
            at += count
            return [integer_value(i, column, span) for column in range(at - count, at)]

        x, image = take(_FEATURES, 5), take(_SIDE * _SIDE, 5)
        to_dense, to_head, to_conv = take(_HIDDEN, 3), take(_HEAD_OUT, 3), take(_KERNELS, 3)
        (to_scale,), (to_table,), (own,) = take(1, 3), take(1, 3), take(1, 5)
        to_scale, to_table = to_scale + 2, to_table + 2  # positive, so sums are not zero
        self.loss += own
        self._dense(weights, x, to_dense)
        self._put("head.weight", [c * max(f, 0) for c in to_head for f in x[:_HEAD_IN]])
        self._conv(weights["conv.weight"], image, to_conv)
        self._put("scale", [to_scale])
        self._to_table += to_table  # at least 1, so no partial sum exceeds the last

    def _dense(self, weights: dict[str, Vector], x: Vector, cotangents: Vector) -> None:
        rows, bias = weights["dense.weight"], weights["dense.bias"]
        active = []
        for h in range(_HIDDEN):
            products = [rows[h * _FEATURES + j] * x[j] for j in range(_FEATURES)] + [bias[h]]
            self._note_activation(sum(map(abs, products)))
            active.append(cotangents[h] if sum(products) > 0 else 0)
        self._put("dense.weight", [c * f for c in active for f in x])
        self._put("dense.bias", active)

    def _conv(self, kernels: Vector, image: Vector, cotangents: Vector) -> None:
        corners = [
            [image[(row + r) * _SIDE + column + c] for r in (0, 1) for c in (0, 1)]
            for row in range(_SIDE - 1)
            for column in range(_SIDE - 1)
        ]
        gradient = []
        for k, cotangent in enumerate(cotangents):
            kernel = kernels[4 * k : 4 * k + 4]
            part = [0, 0, 0, 0]
            for patch in corners:
                products = [w * p for w, p in zip(kernel, patch, strict=True)]
                self._note_activation(sum(map(abs, products)))
                if sum(products) > 0:
                    part = [s + cotangent * p for s, p in zip(part, patch, strict=True)]
            gradient += part
        self._put("conv.weight", gradient, largest=2 * len(corners))

    def _put(self, name: str, values: Vector, largest: int | None = None) -> None:
        self.total[name] = [s + v for s, v in zip(self.total[name], values, strict=True)]
        self._sizes[name] += max(map(abs, values)) if largest is None else largest

    def _note_activation(self, size: int) -> None:
        self.largest_activation = max(self.largest_activation, size)


def initial_weights() -> dict[str, Vector]:
    return {
        "dense.weight": _initial(2, _HIDDEN * _FEATURES),
        "dense.bias": _initial(3, _HIDDEN),
        "head.weight": _initial(4, _HEAD_OUT * _HEAD_IN),
        "conv.weight": _initial(5, _KERNELS * 4),
        "scale": _initial(0, 1),
        "table": _initial(1, 257),
    }


def expand_parameter(name: str, values: Sequence[Fraction]) -> "array[float]":
    """Return all elements of a parameter as floats; the values of the table repeat after 257."""
    floats = array("d", map(float, values))
    if name != "table":
        return floats
    return (floats * (_TABLE // 257 + 1))[:_TABLE]


def _initial(position: int, count: int) -> Vector:
    """Return initial values from the column of the parameter's position in the model: the module's
    own parameters come first (scale, table), then its layers' (dense, head, conv).
    """
    return [integer_value(element, position, 3) for element in range(count)]


def _map(values: Vector, made: Callable[[int], Fraction]) -> list[Fraction]:
    """Apply a function to each value, once for equal ones, since fractions are slow."""
    known = {value: made(value) for value in set(values)}
    return [known[value] for value in values]


def _odd_factor(n: int) -> int:
    """Return the largest odd factor of a number of samples. Raises ValueError for none."""
    if n < 1:
        raise ValueError(f"{n} samples have no odd factor")
    while n % 2 == 0:
        n //= 2
    return n


TABLE_PERIOD = [integer_value(element, 6, 7) for element in range(257)]
