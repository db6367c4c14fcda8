"""The loss of every rank over the reference's, and how far their mean is from it."""

import math
from typing import Any

from distcheck.records.layers import layer_name
from distcheck.reports.pictures import (
    Drawing,
    Picture,
    Table,
    as_float,
    figure,
    line,
    plural,
    ticks,
)

_LEFT, _UPPER, _LOWER, _BETWEEN, _TOP = 64, 130, 60, 30, 8
_LEAST_APART = 12.0  # pixels between two numbers of an axis
_MOST_NUMBERED_STEPS = 400


def draw(name: str, check: dict[str, Any]) -> Picture:
    """Ranks, mean and reference; below, mean less reference, with the bound."""
    found = check["loss"]
    steps = found["steps"]
    ranks = [[as_float(loss) for loss in rank] for rank in found["ranks"]]
    mean, expected, bound = ([as_float(v) for v in found[k]] for k in ("mean", "expected", "bound"))
    off = [a - e for a, e in zip(mean, expected, strict=True)]
    drawing = Drawing(name, 320 if len(steps) <= 20 else 700)
    right = drawing.width - 26

    def x(at: int) -> float:
        return _LEFT + (right - _LEFT) * ((at + 0.5) / len(steps))

    upper = _Scale([*(v for rank in ranks for v in rank), *expected], _TOP, _UPPER)
    lower = _Scale([*off, *bound, *(-b for b in bound), 0.0], _TOP + _UPPER + _BETWEEN, _LOWER)
    for scale in (upper, lower):
        for value in scale.marks:
            y = scale(value) or 0.0
            drawing.path("axis", f"M{_LEFT} {y:.1f}H{right}")
            drawing.text(_LEFT - 6, y + 4, scale.figure(value), kind="faint", end="end")
    band = [(x(i), lower(b)) for i, b in enumerate(bound)]
    band += [(x(i), lower(-b)) for i, b in reversed(list(enumerate(bound)))]
    if any(bound) and len(steps) > 1:
        drawing.path("band", line([_point(*p) for p in band]) + "z")
    for rank in ranks:
        drawing.path("rank", line([_point(x(i), upper(v)) for i, v in enumerate(rank)]))
    drawing.path("required", line([_point(x(i), upper(v)) for i, v in enumerate(expected)]))
    apart = [i for i, (o, b) in enumerate(zip(off, bound, strict=True)) if not abs(o) <= b]
    drawing.path(
        "off" if apart else "within", line([_point(x(i), lower(v)) for i, v in enumerate(off)])
    )
    bottom = _TOP + _UPPER + _BETWEEN + _LOWER
    for i in ticks(len(steps), 10):
        drawing.text(x(i), bottom + 14, str(steps[i]), kind="faint", end="middle")
    drawing.text(_LEFT - 6, bottom + 14, "step", kind="faint", end="end")
    drawing.text(_LEFT, _TOP + _UPPER + _BETWEEN - 6, "mean less reference", kind="faint")
    for number, place in _labels([upper(rank[-1]) for rank in ranks]):
        drawing.text(right + 3, place + 4, str(number), kind="faint")
    drawing.text(right + 16, _TOP + _UPPER + 14, "rank", kind="faint", end="end")
    title = f"Loss of {len(ranks)} ranks and of the reference ({layer_name(check['layer'])})"
    says = (
        f"The ranks' mean leaves its bound at step {steps[apart[0]]}, and at {len(apart)} of "
        f"{plural(len(steps), 'step')} in all."
        if apart
        else "The ranks' mean is within its bound"
        + (f" at all {len(steps)} steps." if len(steps) > 1 else ".")
    )
    says += " Thin lines: ranks, numbered at the right where there is room. Dashed line: reference."
    says += " Below: their mean minus the reference"
    says += ", shaded: the bound." if any(bound) else "; the bound is 0."
    stride = -(-len(steps) // _MOST_NUMBERED_STEPS)
    rows = [
        [str(steps[i]), f"{mean[i]:.9g}", f"{expected[i]:.9g}", figure(off[i]), figure(bound[i])]
        for i in range(0, len(steps), stride)
    ]
    table = Table(["step", "mean of ranks", "reference", "difference", "bound"], rows)
    return Picture(title, says, drawing.markup(bottom + 20, title=title, says=says), table)


def _labels(ends: list[float | None]) -> list[tuple[int, float]]:
    """The ranks whose lines have room for a label at their end, with its place, from the top."""
    placed: list[tuple[int, float]] = []
    for place, rank in sorted((y, rank) for rank, y in enumerate(ends) if y is not None):
        if not placed or place - placed[-1][1] >= _LEAST_APART:
            placed.append((rank, place))
    return placed


class _Scale:
    """From numbers to pixels, upside up; None for what is not finite."""

    def __init__(self, values: list[float], top: float, height: float) -> None:
        finite = [v for v in values if math.isfinite(v)] or [0.0]
        self._low, self._high = min(finite), max(finite)
        if self._low == self._high:
            room = abs(self._low) / 2 or 1.0
            self._low, self._high = self._low - room, self._high + room
        self._top, self._height = top, height
        between = 0.0 if self._low < 0 < self._high else (self._low + self._high) / 2
        apart = _LEAST_APART * (self._high - self._low) / height
        ends = [v for v in (self._low, self._high) if abs(v - between) >= apart]
        self.marks = (between, *ends)

    def figure(self, value: float) -> str:
        """A number of the axis, with as many digits as tell its ends apart."""
        largest = max(abs(self._low), abs(self._high))
        digits = 2 + math.ceil(math.log10(largest / (self._high - self._low) + 1))
        return f"{value:.{min(9, max(3, digits))}g}"

    def __call__(self, value: float) -> float | None:
        if not math.isfinite(value):
            return None
        share = (value - self._low) / (self._high - self._low)
        return self._top + self._height * (1 - share)


def _point(x: float, y: float | None) -> tuple[float, float] | None:
    return None if y is None else (x, y)
