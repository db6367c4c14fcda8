"""Pictures of a report in SVG; one module per kind, which converts entries of a document to a
`Picture`.

A picture needs neither scripts nor a style sheet. Every shape has a class for the page's style
sheet, and attributes with which it is visible without one, in the color of the surrounding text.
Information is never shown by color alone. Sizes are in CSS pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

LEAST_APART = 12.0  # pixels between two numbers of an axis
WIDTHS = (320, 700)  # the style sheet has a class for each

# Appearance of a class if the style sheet is blocked.
_WITHOUT_STYLE = {
    "h0": 'fill="currentColor" fill-opacity=".04"',
    "h1": 'fill="currentColor" fill-opacity=".1"',
    "h2": 'fill="currentColor" fill-opacity=".2"',
    "h3": 'fill="currentColor" fill-opacity=".35"',
    "h4": 'fill="currentColor" fill-opacity=".5"',
    "h5": 'fill="currentColor" fill-opacity=".65"',
    "over": 'fill="#c2302e" fill-opacity=".8"',
    "cross": 'stroke="currentColor" stroke-width="1.2" fill="none"',
    "gone": 'stroke="#c2302e" stroke-width="1.5" fill="none"',
    "same": 'fill="currentColor" fill-opacity=".15"',
    "bar": 'fill="currentColor" fill-opacity=".5"',
    "axis": 'stroke="currentColor" stroke-opacity=".25" fill="none"',
    "rank": 'stroke="currentColor" stroke-opacity=".4" fill="none"',
    "required": 'stroke="currentColor" stroke-width="2" fill="none" stroke-dasharray="6 3"',
    "off": 'stroke="#c2302e" stroke-width="1.5" fill="none"',
    "within": 'stroke="currentColor" stroke-width="1.5" fill="none"',
    "run0": 'stroke="currentColor" stroke-width="1.5" fill="none"',
    "run1": 'stroke="currentColor" stroke-width="1.5" fill="none" stroke-dasharray="6 3"',
    "run2": 'stroke="currentColor" stroke-width="1.5" fill="none" stroke-dasharray="2 2"',
    "run3": 'stroke="currentColor" stroke-width="1.5" fill="none" stroke-dasharray="9 3 2 3"',
    "run4": 'stroke="currentColor" stroke-width="1.5" fill="none" stroke-dasharray="12 4"',
    "run5": 'stroke="currentColor" stroke-width="1.5" fill="none" stroke-dasharray="4 6"',
    "open": 'stroke="currentColor" fill="none" stroke-dasharray="3 2"',
    "label": 'fill="currentColor"',
    "faint": 'fill="currentColor" fill-opacity=".7"',
}


@dataclass(frozen=True)
class Table:
    """The numbers behind a picture. Each of the `rows` begins with its heading."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A picture with its description and its table of numbers."""

    title: str
    says: str
    svg: Markup
    table: Table
    remark: str = ""


class Drawing:
    """An SVG element under construction. `name` makes the ids of its title and
    description unique.
    """

    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self._width = next((w for w in WIDTHS if w >= width), WIDTHS[-1])
        self._parts: list[str] = []

    @property
    def width(self) -> int:
        return self._width

    def path(self, kind: str, d: str, *, title: str = "") -> None:
        """Add a path of class `kind`. Does nothing if the path is empty."""
        if d:
            within = f"<title>{escape(title)}</title>" if title else ""
            self._parts.append(
                f'<path class="{kind}" {_WITHOUT_STYLE[kind]} d="{d}">{within}</path>'
            )

    def text(self, x: float, y: float, words: str, *, kind: str = "label", end: str = "") -> None:
        """Add text at its baseline. `end` is the value of SVG's text-anchor."""
        anchor = f' text-anchor="{end}"' if end else ""
        self._parts.append(
            f'<text class="{kind}" {_WITHOUT_STYLE[kind]} x="{short(x)}" y="{short(y)}"{anchor}>'
            f"{escape(words)}</text>"
        )

    def markup(self, height: float, *, title: str, says: str) -> Markup:
        """Return the complete element. It shrinks if there is too little space, and never grows."""
        name = self._name
        return Markup(
            f'<svg class="w{self._width}" role="img" aria-labelledby="{name}-t {name}-d" '
            f'viewBox="0 0 {self._width} {short(height)}" width="100%" height="{short(height)}" '
            'preserveAspectRatio="xMinYMin meet" font-family="system-ui, sans-serif" '
            f'font-size="11"><title id="{name}-t">{escape(title)}</title>'
            f'<desc id="{name}-d">{escape(says)}</desc>{"".join(self._parts)}</svg>'
        )


def cell(x: float, y: float, width: float, height: float) -> str:
    return f"M{short(x)} {short(y)}h{short(width)}v{short(height)}h-{short(width)}z"


def cross(x: float, y: float, width: float, height: float) -> str:
    """Return the path of a cross in the middle of a rectangle."""
    side = min(width, height) / 2
    x, y, arm = x + (width - side) / 2, y + (height - side) / 2, short(side)
    return f"M{short(x)} {short(y)}l{arm} {arm}m-{arm} 0l{arm}-{arm}"


def line_path(points: Sequence[tuple[float, float] | None]) -> str:
    """Return the path through points. None is a gap, and an isolated point becomes a short dash."""
    d, before = [], False
    for at, point in enumerate(points):
        if point is None:
            before = False
            continue
        d.append(f"{'L' if before else 'M'}{short(point[0])} {short(point[1])}")
        follows = at + 1 < len(points) and points[at + 1] is not None
        if not before and not follows:
            d.append("m-5 0h10")
        before = True
    return "".join(d)


def short(value: float) -> str:
    """Format a coordinate with one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def shorten_middle(words: str, most: int) -> str:
    """Shorten text to `most` characters by removing its middle: both ends of a parameter's name
    matter.
    """
    if len(words) <= most:
        return words
    left = (most - 1) // 2
    return f"{words[:left]}…{words[-(most - 1 - left) :]}"


def ticks(count: int, most: int = 8) -> range:
    """Return evenly spaced positions among `count`, beginning with the first; about
    `most` at most.
    """
    if count <= most:
        return range(count)
    rough = count / most
    stride = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 10**9) if s >= rough)
    return range(0, count, stride)


def figure(value: float | None) -> str:
    """Format a number with three digits for a table or an axis; None as a dash."""
    return "-" if value is None else f"{value:.3g}"


def plural(number: int, what: str) -> str:
    """Format a number with a noun: "1 step", "2 steps"."""
    return f"{number} {what}{'s' * (number != 1)}"


class RoundAxis:
    """Vertical axis between round numbers. It maps numbers to pixels, and numbers that are not
    finite to None.
    """

    def __init__(self, values: list[float], top: float, height: float) -> None:
        finite = [v for v in values if math.isfinite(v)] or [0.0]
        low, high = min(finite), max(finite)
        if low == high:
            room = abs(low) / 2 or 1.0
            low, high = low - room, high + room
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        stride = power * next(s for s in (1, 2, 5, 10) if s * power >= rough)
        first, last = math.floor(low / stride), math.ceil(high / stride)
        self._low, self._high = first * stride, last * stride
        self._top, self._height = top, height
        self.marks = tuple(n * stride for n in range(first, last + 1))

    def figure(self, value: float) -> str:
        """Format a number of the axis with enough digits to distinguish the ends of the axis."""
        largest = max(abs(self._low), abs(self._high))
        digits = 2 + math.ceil(math.log10(largest / (self._high - self._low) + 1))
        return f"{value:.{min(9, max(3, digits))}g}"

    def __call__(self, value: float) -> float | None:
        if not math.isfinite(value):
            return None
        share = (value - self._low) / (self._high - self._low)
        return self._top + self._height * (1 - share)


def point(x: float, y: float | None) -> tuple[float, float] | None:
    """Return a point of a line, or None."""
    return None if y is None else (x, y)
