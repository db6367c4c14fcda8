"""Axes of numbers: what curves share."""

import math

LEAST_APART = 12.0  # pixels between two numbers of an axis


def labels(ends: list[float | None]) -> list[tuple[int, float]]:
    """The numbers of the lines that have room for a label at their end, each with its place."""
    placed: list[tuple[int, float]] = []
    for place, number in sorted((y, number) for number, y in enumerate(ends) if y is not None):
        if not placed or place - placed[-1][1] >= LEAST_APART:
            placed.append((number, place))
    return placed


class Scale:
    """From numbers to pixels, upside up; None for what is not finite."""

    def __init__(self, values: list[float], top: float, height: float) -> None:
        finite = [v for v in values if math.isfinite(v)] or [0.0]
        self._low, self._high = min(finite), max(finite)
        if self._low == self._high:
            room = abs(self._low) / 2 or 1.0
            self._low, self._high = self._low - room, self._high + room
        self._top, self._height = top, height
        between = 0.0 if self._low < 0 < self._high else (self._low + self._high) / 2
        apart = LEAST_APART * (self._high - self._low) / height
        ends = [v for v in (self._low, self._high) if abs(v - between) >= apart]
        self.marks = (between, *ends)

    def figure(self, value: float) -> str:
        """A number of the axis, with as many digits as tell its ends apart."""
        largest = max(abs(self._low), abs(self._high))
        digits = 2 + math.ceil(math.log10(largest / (self._high - self._low) + 1))
        return f"{value:.{min(9, max(3, digits))}g}"

    def __call__(self, value: float) -> float | None:
        """Its height on the page."""
        if not math.isfinite(value):
            return None
        share = (value - self._low) / (self._high - self._low)
        return self._top + self._height * (1 - share)


def point(x: float, y: float | None) -> tuple[float, float] | None:
    """A point of a line; None where there is none."""
    return None if y is None else (x, y)
