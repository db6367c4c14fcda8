"""Summaries of comparisons for pictures; no verdict depends on them. Does not import torch."""

from collections.abc import Sequence

import msgspec

MOST_ELEMENTS = 12  # worst elements kept per check
NONFINITE = 1000  # the bin of elements without a distance in ULP


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """One of the elements with the largest errors: its values, and their bits in hexadecimal in the
    tensor's dtype. `ranks` held the same wrong value.
    """

    parameter: str
    step: int
    index: tuple[int, ...]
    ranks: tuple[int, ...]
    actual: float | str
    expected: float | str
    actual_bits: str
    expected_bits: str
    error: float | str
    bound: float | str
    ulp: int | None
    share: float | str


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of one step: the loss of every rank, their mean weighted by samples, and the
    expected mean.
    """

    ranks: tuple[float | str, ...]
    mean: float | str
    expected: float | str
    bound: float | str


class Aggregates(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one check under one layer.

    shares    tensor, step: the largest ratio of error to bound; "inf" for an error without a bound
    in_bits   True if tensors were compared bitwise, so that every share is 0 or "inf"
    ulps      histogram of the signed distance in ULP: bin b > 0 has the distances 2^(b-1) to
              2^b - 1, bin -b the negative ones, bin 0 equal bits; estimated from every n-th
              differing element
    elements  the failing elements with the largest errors, largest first
    losses    step: the loss
    digests   step, kind: one digest per rank over all tensors of that kind
    """

    shares: dict[str, dict[int, float | str]] = {}
    in_bits: bool = True
    ulps: dict[int, int] = {}
    elements: tuple[Element, ...] = ()
    losses: dict[int, Losses] = {}
    digests: dict[int, dict[str, tuple[str, ...]]] = {}


def merge_aggregates(parts: Sequence[Aggregates]) -> Aggregates:
    """Merge summaries for disjoint sets of steps."""
    if len(parts) == 1:
        return parts[0]
    shares: dict[str, dict[int, float | str]] = {}
    ulps: dict[int, int] = {}
    losses: dict[int, Losses] = {}
    digests: dict[int, dict[str, tuple[str, ...]]] = {}
    for part in parts:
        for name, row in part.shares.items():
            shares.setdefault(name, {}).update(row)
        for place, count in part.ulps.items():
            ulps[place] = ulps.get(place, 0) + count
        losses.update(part.losses)
        digests.update(part.digests)
    return Aggregates(
        shares=shares,
        in_bits=all(part.in_bits for part in parts),
        ulps=ulps,
        elements=worst_first([element for part in parts for element in part.elements]),
        losses=losses,
        digests=digests,
    )


def worst_first(elements: Sequence[Element]) -> tuple[Element, ...]:
    """Return the worst elements, sorted by error over bound, then by error, then by step."""

    def order(element: Element) -> tuple[float, float, int]:
        return (-_size(element.share), -_size(element.error), element.step)

    return tuple(sorted(elements, key=order)[:MOST_ELEMENTS])


def _size(value: float | str) -> float:
    number = float(value)
    return float("inf") if number != number else number
