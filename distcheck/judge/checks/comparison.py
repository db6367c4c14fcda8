"""Compares two tensors in three ways: bitwise, within a bound, by relative L2 norm.

Each comparison returns the first failing place, and the place that is closest to failing (or fails
worst). The tally adds the names of tensors, ranks and steps, which are unknown here.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from distcheck.machine.numerics import real_parts
from distcheck.records import Difference, number
from distcheck.records.decoding import MOST

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Struct codes of the float and the integer, and the number of integer bits the dtype lacks.
_STRUCT = {
    torch.float64: ("d", "q", 0), torch.float32: ("f", "i", 0), torch.float16: ("e", "h", 0),
    torch.bfloat16: ("f", "i", 16),
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The comparison of one tensor, which fails if it has a first place. `undecided` is the reason
    that a failed one does not prove a mistake.
    """

    elements: int
    worst: Difference | None = None
    first: Difference | None = None
    undecided: str = ""

    @property
    def ok(self) -> bool:
        return self.first is None


def tensor_difference(
    actual: float, expected: float, error: float, bound: float, *, unit: str = "L2 norm"
) -> Difference:
    """Return the difference of two tensors as numbers; its tensor, rank and step are unknown."""
    return Difference(
        parameter="", rank=0, step=0, index=(), actual=number(actual), expected=number(expected),
        error=number(error), bound=number(bound), unit=unit,
    )  # fmt: skip


def integer_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as integers: -0 differs from +0, and NaN equals the same NaN."""
    tensor = real_parts(tensor).contiguous()
    return tensor.view(_INTEGER[tensor.element_size()])


def compare_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare bitwise. NaN equals any NaN: IEEE 754 does not define the sign and payload of a sum
    of two NaNs (2019, section 6.2.3), and processors and compilers differ.
    """
    expected = expected.to(actual.device)
    if torch.equal(integer_bits(actual), integer_bits(expected)):
        return Comparison(actual.numel())
    same = (integer_bits(actual) == integer_bits(expected)) | (
        real_parts(actual).isnan() & real_parts(expected).isnan()
    )
    if bool(same.all()):
        return Comparison(actual.numel())
    if actual.is_complex():  # equal if both parts are
        same = same.all(-1)
    differs = ~same.reshape(-1)
    error = torch.where(differs, _distance(actual, expected).reshape(-1), -1.0)
    zero = torch.zeros((), dtype=torch.float64)
    return Comparison(
        actual.numel(),
        worst=_place(actual, expected, zero, int(error.argmax())),
        first=_place(actual, expected, zero, int(differs.int().argmax())),
    )


def compare_numbers(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare bitwise, but -0 equals +0: for expectations that are exact numbers."""
    return compare_bitwise(actual + 0.0, expected + 0.0)


def compare_within(
    actual: torch.Tensor,
    expected: torch.Tensor,
    bound: torch.Tensor,
    *,
    nan_is_expected: bool = False,
) -> Comparison:
    """Compare |actual - expected| <= bound elementwise; `expected` and `bound` in float64.

    Nothing is within a negative, infinite or NaN bound. NaN is not within any bound, unless
    `nan_is_expected`: then NaN is right if NaN is expected. A complex number is within the bound if
    both parts are. Its place then has an additional index, 0 for the real and 1 for the imaginary
    part.
    """
    if actual.is_complex():
        parts = compare_within(real_parts(actual), expected, bound, nan_is_expected=nan_is_expected)
        return replace(parts, elements=actual.numel())
    if actual.numel() == 0:
        return Comparison(0)
    expected, bound = expected.to(actual.device), bound.to(actual.device)
    closest = _closest_if_all_within(actual, expected, bound)
    if closest is not None:
        place = _place(actual, expected, bound, closest)
        return Comparison(actual.numel(), worst=place)
    distance = _distance(actual, expected, nan_is_expected=nan_is_expected).reshape(-1)
    limits = bound.reshape(-1)
    bounds = (limits >= 0) & (limits < math.inf)
    fails = ~(bounds & (distance <= limits))
    share = torch.where(bounds & (limits > 0), distance / limits, torch.where(fails, math.inf, 0.0))
    share = share.nan_to_num(nan=math.inf)
    failing = int(fails.int().argmax())
    return Comparison(
        actual.numel(),
        worst=_place(actual, expected, bound, int(share.argmax())),
        first=_place(actual, expected, bound, failing) if bool(fails.any()) else None,
    )


def _closest_if_all_within(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> int | None:
    """Return the place with the largest error / bound if it is at most 1 everywhere, else None.

    This is the common case, in few passes over memory. A NaN makes argmax point at a value that is
    not at most 1; the caller examines that, and bounds that are not positive, in detail.
    """
    least, most = bound.aminmax()
    if not 0.0 < float(least) <= float(most) < math.inf:
        return None
    share = (actual.double() - expected).abs_().div_(bound).reshape(-1)
    worst = int(share.argmax())
    return worst if float(share[worst]) <= 1.0 else None


def compare_by_norm(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    *,
    nan_is_expected: bool = False,
) -> Comparison:
    """Compare the L2 norm of the difference with `tolerance`; everything is within an infinite one.
    An expected infinity must match exactly. `nan_is_expected` is as in `compare_within`.
    """
    if actual.is_complex():
        pair = real_parts(actual), real_parts(expected)
        parts = compare_by_norm(*pair, tolerance, nan_is_expected=nan_is_expected)
        return replace(parts, elements=actual.numel())
    wanted = expected.to(actual.device).double()
    error = float((actual.double() - wanted).norm())
    if math.isnan(error):
        error = float(_distance(actual, wanted, nan_is_expected=nan_is_expected).norm())
    norms = float(actual.double().norm()), float(wanted.norm())
    place = tensor_difference(*norms, error, tolerance)
    return Comparison(actual.numel(), place, None if error <= tolerance < math.inf else place)


def ulp_distance(actual: float, expected: float, dtype: torch.dtype) -> int | None:
    """Return the signed number of representable steps between two numbers; None if undefined. It is
    limited to `MOST` (float64 has more steps between 2 and -2).
    """
    if dtype not in _STRUCT or not (math.isfinite(actual) and math.isfinite(expected)):
        return None
    try:
        distance = _ordered_integer(actual, *_STRUCT[dtype]) - _ordered_integer(
            expected, *_STRUCT[dtype]
        )
    except OverflowError:  # a float64 expectation outside the dtype's range
        return None
    return max(-MOST, min(distance, MOST))


def _ordered_integer(value: float, kind: str, integer: str, drop_bits: int) -> int:
    """Map a float to an integer in the same order, adjacent floats to adjacent integers."""
    raw: int = struct.unpack(f"<{integer}", struct.pack(f"<{kind}", value))[0]
    magnitude = raw & ((1 << (8 * struct.calcsize(integer) - 1)) - 1)
    return (-magnitude if raw < 0 else magnitude) >> drop_bits


def _distance(
    actual: torch.Tensor, expected: torch.Tensor, *, nan_is_expected: bool = False
) -> torch.Tensor:
    if actual.is_complex():
        return (actual.to(torch.complex128) - expected.to(torch.complex128)).abs()
    actual, expected = actual.double(), expected.double()  # float8 has no comparison
    distance = (actual - expected).abs()
    # Infinity minus itself is NaN: equal infinities have distance 0, others infinity.
    same = actual == expected
    if nan_is_expected:
        same = same | (actual.isnan() & expected.isnan())
    return torch.where(distance.isnan(), torch.where(same, 0.0, math.inf), distance)


def _place(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, position: int
) -> Difference:
    index = index_of(position, actual.shape)
    got = actual.reshape(-1)[position]
    want = expected.reshape(-1)[position]
    limit = bound.reshape(-1)[position if bound.numel() > 1 else 0]
    actual_value, expected_value = _scalar(got), _scalar(want)
    distance = ulp_distance(actual_value, expected_value, actual.dtype)
    return structs.replace(
        tensor_difference(
            actual_value, expected_value, float(_distance(got, want)), float(limit), unit="absolute"
        ),
        index=index,
        ulp=None if distance is None else abs(distance),
        actual_bits=hex_bits(actual_value, actual.dtype),
        expected_bits=hex_bits(expected_value, actual.dtype),
    )


def index_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        index.append(at)
    return tuple(reversed(index))


def hex_bits(value: float, dtype: torch.dtype) -> str:
    """Return the bits of a number in a dtype as hexadecimal digits, or ""."""
    if dtype not in _STRUCT:
        return ""
    if dtype == torch.bfloat16:
        nearest = float(torch.tensor(value, dtype=torch.float64).to(dtype))
        return struct.pack(">f", nearest).hex()[:4]
    try:
        return struct.pack(f">{_STRUCT[dtype][0]}", value).hex()
    except OverflowError:  # outside the dtype's range
        return ""


def _scalar(element: torch.Tensor) -> float:
    return float(element.abs()) if element.is_complex() else float(element)
