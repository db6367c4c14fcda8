"""Draws one curve per run, over steps or epochs."""

from collections.abc import Sequence

from distcheck.reports.pictures import (
    LEAST_APART,
    Drawing,
    Picture,
    RoundAxis,
    Table,
    figure,
    line_path,
    point,
    ticks,
)

_LEFT, _TOP, _HEIGHT = 64, 8, 220
_LETTER, _MOST_NAME = 6.4, 24  # pixels per letter; letters of a name at the end of a line
_MOST_POINTS = 300  # Heuristic: more than two per pixel would be invisible
_KINDS = 6  # line styles: solid, and five kinds of dashes
Curve = Sequence[float | None]


def draw(
    name: str, what: str, unit: str, curves: Sequence[Curve], *, runs: Sequence[str], shares: bool,
    first: int = 1,
) -> Picture | None:  # fmt: skip
    """Draw the curves of `what` over `unit`, with the names of the runs at their ends. Return None
    if all are empty. `shares` are shown in percent, from 0 to 100. Units are numbered from `first`.
    """
    longest = max(map(len, curves), default=0)
    if not longest:
        return None
    stretch = -(-longest // _MOST_POINTS)
    thinned = [_means(curve, stretch) for curve in curves]
    drawing = Drawing(name, 700)
    names = [f"{run[: _MOST_NAME - 1]}…" if len(run) > _MOST_NAME else run for run in runs]
    values = [v for curve in thinned for v in curve if v is not None]
    scale = RoundAxis([0.0, 1.0] if shares else [0.0, *values], _TOP, _HEIGHT)
    heights = [[None if v is None else scale(v) for v in curve] for curve in thinned]
    ends = [next((y for y in reversed(curve) if y is not None), None) for curve in heights]
    named = _labels(ends, names)
    right = drawing.width - 8 - _LETTER * max((len(text) for _, text in named), default=0)
    places = -(-longest // stretch)

    def x(at: int) -> float:
        return _LEFT + (right - _LEFT) * ((at + 0.5) / places)

    for value in scale.marks:
        y = scale(value) or 0.0
        drawing.path("axis", f"M{_LEFT} {y:.1f}H{right}")
        shown = f"{value:.0%}" if shares else scale.figure(value)
        drawing.text(_LEFT - 6, y + 4, shown, kind="faint", end="end")
    for number, curve in enumerate(heights):
        d = line_path([point(x(i), y) for i, y in enumerate(curve)])
        drawing.path(f"run{number % _KINDS}", d, title=runs[number])
    for place, text in named:
        drawing.text(right + 3, place + 4, text, kind="faint")
    bottom = _TOP + _HEIGHT
    at = ticks(places, 8)
    for i in at if stretch > 1 or at.step == 1 else range(at.step - 1, places, at.step):
        drawing.text(x(i), bottom + 14, str(i * stretch + first), kind="faint", end="middle")
    drawing.text(_LEFT - 6, bottom + 14, unit, kind="faint", end="end")
    title = f"{what.capitalize()} by {unit}"
    says = f"Each point is the mean of {stretch} {unit}s." if stretch > 1 else ""
    rows = [
        [str(i * stretch + first), *("" if i >= len(c) else figure(c[i]) for c in thinned)]
        for i in range(places)
    ]
    heads = [unit, *runs]
    svg = drawing.markup(bottom + 20, title=title, says=says)
    return Picture(title, says, svg, Table(heads, rows))


def _labels(ends: Sequence[float | None], names: Sequence[str]) -> list[tuple[float, str]]:
    """Return the positions and texts of the labels. Curves that end close to each other share a
    label, if it fits.
    """
    placed: list[tuple[float, str]] = []
    for place, name in sorted(
        (y, name) for y, name in zip(ends, names, strict=True) if y is not None
    ):
        if not placed or place - placed[-1][0] >= LEAST_APART:
            placed.append((place, name))
        elif len(both := f"{placed[-1][1]}; {name}") <= 2 * _MOST_NAME:
            placed[-1] = (placed[-1][0], both)
    return placed


def _means(curve: Curve, stretch: int) -> list[float | None]:
    """Return the mean of each interval; None for an interval with a gap."""
    found: list[float | None] = []
    for first in range(0, len(curve), stretch):
        part = [v for v in curve[first : first + stretch] if v is not None]
        whole = len(part) == len(curve[first : first + stretch])
        found.append(sum(part) / len(part) if whole else None)
    return found
