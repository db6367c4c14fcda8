"""Sums up what one check sees, for pictures; beside the tally, which is what decides."""

import math
from collections.abc import Iterable

from distcheck.judge.checks.comparison import Comparison, Place
from distcheck.records import number
from distcheck.records.picture_sums import MOST_ELEMENTS, Aggregates, Element, Losses, worst_first

_KEPT_BEFORE_SORTING = 16 * MOST_ELEMENTS


class Sums:
    """The running sums of one check under one layer."""

    def __init__(self) -> None:
        self._shares: dict[str, dict[int, float]] = {}
        self._in_bits = True
        self._ulps: dict[int, int] = {}
        self._elements: dict[tuple[str, int, Place], list[int]] = {}
        self._losses: dict[int, Losses] = {}
        self._digests: dict[int, dict[str, tuple[str, ...]]] = {}

    def add(self, comparison: Comparison, *, parameter: str, rank: int, step: int) -> None:
        worst = comparison.worst
        if worst is not None and worst.bound > 0:
            self._in_bits = False
        share = 0.0 if worst is None and comparison.ok else _share(worst)
        wrong = not comparison.ok and share <= 1  # bits that differ where the numbers do not
        self._note(parameter, step, math.inf if wrong else share)
        for place, count in comparison.ulps.items():
            self._ulps[place] = self._ulps.get(place, 0) + count
        for place_of in comparison.places:
            self._elements.setdefault((parameter, step, place_of), []).append(rank)
        if len(self._elements) > _KEPT_BEFORE_SORTING:
            kept = set(self._worst())
            self._elements = {
                key: ranks for key, ranks in self._elements.items() if _element(*key, ranks) in kept
            }

    def fail(self, *, parameter: str, step: int) -> None:
        """Takes in a tensor that is missing, or out of place."""
        self._note(parameter, step, math.inf)

    def add_losses(
        self, step: int, ranks: Iterable[float], *, mean: float, expected: float, bound: float
    ) -> None:
        self._losses[step] = Losses(
            ranks=tuple(number(loss) for loss in ranks),
            mean=number(mean),
            expected=number(expected),
            bound=number(bound),
        )

    def add_digests(self, step: int, kind: str, ranks: Iterable[str]) -> None:
        """Takes in what every rank held after one step, by digest."""
        self._digests.setdefault(step, {})[kind] = tuple(ranks)

    def result(self) -> Aggregates:
        return Aggregates(
            shares={
                name: {step: number(share) for step, share in row.items()}
                for name, row in self._shares.items()
            },
            in_bits=self._in_bits,
            ulps=self._ulps,
            elements=self._worst(),
            losses=self._losses,
            digests=self._digests,
        )

    def _note(self, parameter: str, step: int, share: float) -> None:
        row = self._shares.setdefault(parameter, {})
        row[step] = max(row.get(step, 0.0), share)

    def _worst(self) -> tuple[Element, ...]:
        return worst_first([_element(*key, ranks) for key, ranks in self._elements.items()])


def _share(place: Place | None) -> float:
    if place is None or math.isnan(place.error):
        return math.inf
    if place.bound == 0:
        return math.inf if place.error or place.actual_bits != place.expected_bits else 0.0
    return place.error / place.bound


def _element(parameter: str, step: int, place: Place, ranks: list[int]) -> Element:
    return Element(
        parameter=parameter,
        step=step,
        index=place.index,
        ranks=tuple(ranks),
        actual=number(place.actual),
        expected=number(place.expected),
        actual_bits=place.actual_bits,
        expected_bits=place.expected_bits,
        error=number(place.error),
        bound=number(place.bound),
        ulp=place.ulp,
        share=number(_share(place)),
    )
