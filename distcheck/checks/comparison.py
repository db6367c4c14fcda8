"""The three ways of comparing two tensors: to the bit, within a bound, by relative L2 norm.

Each returns the place that comes closest to failing (or fails worst) and the first that fails.
`index` is the position in the tensor; nothing here knows about ranks or steps.
"""

import math
import struct
from dataclasses import dataclass

import torch

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRUCT = {torch.float64: ("d", "q"), torch.float32: ("f", "i"), torch.float16: ("e", "h")}


@dataclass(frozen=True)
class Place:
    """One element (or, with an empty index, a whole tensor): how far it is from expected."""

    index: tuple[int, ...]
    actual: float
    expected: float
    error: float
    bound: float
    ulp: int | None
    unit: str


@dataclass(frozen=True)
class Comparison:
    """The result over one tensor."""

    ok: bool
    elements: int
    worst: Place | None = None
    first: Place | None = None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that -0 is not +0 and NaN equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_INTEGER[tensor.element_size()])


def bitwise(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Equal to the bit, or not."""
    if torch.equal(bits(actual), bits(expected)):
        return Comparison(True, actual.numel())
    same = bits(actual) == bits(expected)
    if actual.is_complex():  # a number is the same if both its parts are
        same = same.all(-1)
    differs = ~same.reshape(-1)
    error = torch.where(differs, _distance(actual, expected).reshape(-1), -1.0)
    zero = torch.zeros((), dtype=torch.float64)
    return Comparison(
        False,
        actual.numel(),
        worst=_place(actual, expected, zero, int(error.argmax())),
        first=_place(actual, expected, zero, int(differs.int().argmax())),
    )


def equal_numbers(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Equal to the bit, except that -0 equals +0: for expectations that are exact numbers."""
    return bitwise(actual + 0.0, expected + 0.0)


def within(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> Comparison:
    """|actual - expected| <= bound, elementwise; `expected` and `bound` in float64."""
    if actual.numel() == 0:
        return Comparison(True, 0)
    closest = _closest_if_all_within(actual, expected, bound)
    if closest is not None:
        place = _place(actual, expected, bound, closest)
        return Comparison(True, actual.numel(), worst=place)
    distance = _distance(actual, expected).reshape(-1)
    limits = bound.reshape(-1)
    fails = ~(distance <= limits)
    share = torch.where(limits > 0, distance / limits, torch.where(fails, math.inf, 0.0))
    worst = int(share.nan_to_num(nan=math.inf).argmax())
    ok = not bool(fails.any())
    first = None if ok else _place(actual, expected, bound, int(fails.int().argmax()))
    return Comparison(ok, actual.numel(), worst=_place(actual, expected, bound, worst), first=first)


def _closest_if_all_within(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> int | None:
    """Where the error is the largest share of its bound, if it is all of it nowhere.

    The common case in few passes over memory. A NaN, or a bound of zero, makes argmax point at
    something that is not at most 1; the caller then looks more closely.
    """
    if actual.is_complex():
        return None
    share = (actual.double() - expected).abs_().div_(bound).reshape(-1)
    worst = int(share.argmax())
    return worst if float(share[worst]) <= 1.0 else None


def by_norm(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> Comparison:
    """The L2 norm of the difference is at most `tolerance`."""
    wanted = expected.double()
    error = float((actual.double() - wanted).norm())
    norm = float(wanted.norm())
    place = Place(
        index=(),
        actual=float(actual.double().norm()),
        expected=norm,
        error=error,
        bound=tolerance,
        ulp=None,
        unit="L2 norm",
    )
    ok = error <= tolerance
    return Comparison(ok, actual.numel(), worst=place, first=None if ok else place)


def ulp_distance(actual: float, expected: float, dtype: torch.dtype) -> int | None:
    """How many representable numbers lie between the two; None where that means nothing."""
    if not (math.isfinite(actual) and math.isfinite(expected)):
        return None
    if dtype == torch.bfloat16:
        return _ordered(actual, "f", "i", 16) - _ordered(expected, "f", "i", 16)
    if dtype not in _STRUCT:
        return None
    kind, integer = _STRUCT[dtype]
    try:
        return _ordered(actual, kind, integer, 0) - _ordered(expected, kind, integer, 0)
    except OverflowError:  # a float64 expectation beyond the dtype's range
        return None


def _ordered(value: float, kind: str, integer: str, drop_bits: int) -> int:
    """Integers in the order of the floats they encode, neighbours one apart."""
    raw: int = struct.unpack(f"<{integer}", struct.pack(f"<{kind}", value))[0]
    magnitude = raw & ((1 << (8 * struct.calcsize(integer) - 1)) - 1)
    return (-magnitude if raw < 0 else magnitude) >> drop_bits


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if actual.is_complex():
        return (actual.to(torch.complex128) - expected.to(torch.complex128)).abs()
    distance = (actual.double() - expected.double()).abs()
    # Infinity minus itself is not a number: equal infinities are no difference, others endless.
    return torch.where(distance.isnan(), torch.where(actual == expected, 0.0, math.inf), distance)


def _place(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, position: int
) -> Place:
    index = torch.unravel_index(torch.tensor(position), actual.shape)
    got = actual.reshape(-1)[position]
    want = expected.reshape(-1)[position]
    limit = bound.reshape(-1)[position if bound.numel() > 1 else 0]
    actual_value, expected_value = _scalar(got), _scalar(want)
    distance = ulp_distance(actual_value, expected_value, actual.dtype)
    return Place(
        index=tuple(int(i) for i in index),
        actual=actual_value,
        expected=expected_value,
        error=float(_distance(got, want)),
        bound=float(limit),
        ulp=None if distance is None else abs(distance),
        unit="absolute",
    )


def _scalar(element: torch.Tensor) -> float:
    return float(element.abs()) if element.is_complex() else float(element)
