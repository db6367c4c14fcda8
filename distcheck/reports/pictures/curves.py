"""One curve for each run, over steps or epochs."""

from collections.abc import Sequence

from distcheck.reports.pictures import (
    Drawing,
    NumberAxis,
    Picture,
    Table,
    figure,
    labels,
    line,
    point,
    ticks,
)

_LEFT, _TOP, _HEIGHT = 64, 8, 150
_MOST_POINTS = 300  # Chosen: more than two to a pixel would not be seen
_KINDS = 6  # of lines: solid, and five kinds of dashes
Curve = Sequence[float | None]


def draw(name: str, what: str, unit: str, curves: Sequence[Curve]) -> Picture | None:
    """The curves of `what` over `unit`, numbered from 1 at their ends; None where all are empty."""
    longest = max(map(len, curves), default=0)
    if not longest:
        return None
    stretch = -(-longest // _MOST_POINTS)
    thinned = [_means(curve, stretch) for curve in curves]
    drawing = Drawing(name, 320 if longest <= 20 else 700)
    right = drawing.width - 26
    places = -(-longest // stretch)

    def x(at: int) -> float:
        return _LEFT + (right - _LEFT) * ((at + 0.5) / places)

    scale = NumberAxis([v for curve in thinned for v in curve if v is not None], _TOP, _HEIGHT)
    for value in scale.marks:
        y = scale(value) or 0.0
        drawing.path("axis", f"M{_LEFT} {y:.1f}H{right}")
        drawing.text(_LEFT - 6, y + 4, scale.figure(value), kind="faint", end="end")
    heights = [[None if v is None else scale(v) for v in curve] for curve in thinned]
    for number, curve in enumerate(heights):
        d = line([point(x(i), y) for i, y in enumerate(curve)])
        drawing.path(f"run{number % _KINDS}", d, title=f"run {number + 1}")
    ends = [next((y for y in reversed(curve) if y is not None), None) for curve in heights]
    for number, place in labels(ends):
        drawing.text(right + 3, place + 4, str(number + 1), kind="faint")
    bottom = _TOP + _HEIGHT
    for i in ticks(places, 8):
        drawing.text(x(i), bottom + 14, str(i * stretch + 1), kind="faint", end="middle")
    drawing.text(_LEFT - 6, bottom + 14, unit, kind="faint", end="end")
    title = f"{what.capitalize()} by {unit}"
    says = "Lines are numbered at the right as the runs are, where there is room."
    if stretch > 1:
        says += f" Each point is the mean of {stretch} {unit}s."
    rows = [
        [str(i * stretch + 1), *("" if i >= len(c) else _number(c[i]) for c in thinned)]
        for i in range(places)
    ]
    heads = [unit, *(f"run {number + 1}" for number in range(len(curves)))]
    svg = drawing.markup(bottom + 20, title=title, says=says)
    return Picture(title, says, svg, Table(heads, rows))


def _means(curve: Curve, stretch: int) -> list[float | None]:
    """The mean of every stretch; None where it has a gap."""
    found: list[float | None] = []
    for first in range(0, len(curve), stretch):
        part = [v for v in curve[first : first + stretch] if v is not None]
        whole = len(part) == len(curve[first : first + stretch])
        found.append(sum(part) / len(part) if whole else None)
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else figure(value)
