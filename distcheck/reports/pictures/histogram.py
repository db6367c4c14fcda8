"""Histogram of the elements' distance in ULP from the expectation."""

import math

from distcheck.reports.document import CheckEntry
from distcheck.reports.pictures import Drawing, Picture, Table, cell, ticks
from distcheck.reports.pictures.heat import layer_of
from distcheck.reports.wording import count

_TOP, _HEIGHT, _LEFT = 18, 120, 52  # wide enough for "100,000"


def shows_something(check: CheckEntry) -> bool:
    """Return True if there are other than equal bits; a single bar is not drawn."""
    found = check.ulp
    return bool(found and (set(found.bins) != {"0"} or found.nonfinite > 0))


def draw(name: str, check: CheckEntry) -> Picture:
    """Draw bars on a logarithmic scale; bins of powers of two, on both sides of equal bits."""
    found = check.ulp
    assert found
    bins, nonfinite = {int(b): n for b, n in found.bins.items()}, found.nonfinite
    reach = max([3, *(abs(b) for b in bins)])
    drawing = Drawing(name, 320)
    width = (drawing.width - 2 * _LEFT) / (2 * reach + 1)
    most = math.log10(max(bins.values(), default=1)) or 1.0
    bars, equal = [], ""
    for place, number in sorted(bins.items()):
        height = _bar_height(number, most)
        x = _LEFT + width * (place + reach)
        bar = cell(x, _TOP + _HEIGHT - height, max(1.0, width - 1), height)
        if place == 0:
            equal = bar
        else:
            bars.append(bar)
    for power in ticks(int(most) + 1, 7):
        y = _TOP + _HEIGHT - _bar_height(10**power, most)
        drawing.path("axis", f"M{_LEFT} {y:.1f}H{drawing.width - _LEFT}")
        drawing.text(_LEFT - 6, y + 4, count(10**power), kind="faint", end="end")
    drawing.path("bar", "".join(bars))
    drawing.path("h5", equal)
    drawing.path("axis", f"M{_LEFT} {_TOP + _HEIGHT}H{drawing.width - _LEFT}")
    halves = {-(reach + 1) // 2, (reach + 1) // 2} if reach > 5 else set()
    marks = sorted({-reach, 0, reach} | halves)
    for place in marks:
        x = _LEFT + width * (place + reach + 0.5)
        end = "start" if place == -reach else "end" if place == reach else "middle"
        x += {"start": -width / 2, "end": width / 2, "middle": 0.0}[end]
        drawing.text(x, _TOP + _HEIGHT + 14, _edge(place), kind="faint", end=end)
    middle = drawing.width / 2
    drawing.text(middle, _TOP + _HEIGHT + 28, "ULP from expected", kind="faint", end="middle")
    drawing.text(0, 11, "elements", kind="faint")
    drawing.text(_LEFT + 22, 11, "below expected", kind="faint")
    drawing.text(drawing.width - _LEFT, 11, "above", kind="faint", end="end")
    total = sum(bins.values()) + nonfinite
    title = f"Distance in ULP: {check.check}{layer_of(check)}"
    equal_share = bins.get(0, 0) / total if total else 0.0
    says = f"{_percent(equal_share)} of {count(total)} elements, over all ranks, are bit-identical"
    far = max((abs(b) for b in bins if b), default=0)
    says += f"; the furthest is {_edge(far)} ULP or more away." if far else "."
    if nonfinite:
        says += f" {count(nonfinite)} are an infinity or NaN, and have no distance."
    says += " The scale of the heights is logarithmic."
    rows = [[_bin_name(b), f"{n:,}"] for b, n in sorted(bins.items())]
    if nonfinite:
        rows.append(["infinity or NaN", f"{nonfinite:,}"])
    table = Table(["ULP from expected", "elements"], rows)
    svg = drawing.markup(_TOP + _HEIGHT + 34, title=title, says=says)
    remark = "Counts of large tensors are estimated from every n-th element." if far else ""
    return Picture(title, says, svg, table, remark)


def _bar_height(number: int, most: float) -> float:
    return _HEIGHT * (0.04 + 0.96 * math.log10(max(number, 1)) / most)


def _edge(place: int) -> str:
    """Format the end of a bin nearer to 0; from 1,024 on as a power of two."""
    sign, size = ("-" if place < 0 else ""), abs(place)
    return f"{sign}2^{size - 1}" if size > 10 else f"{sign}{2**size // 2}"


def _bin_name(place: int) -> str:
    """Format the ends of a bin, the lower first: "4 to 7", "-7 to -4"."""
    if abs(place) < 2:
        return _edge(place)
    if abs(place) > 10:
        return f"{_edge(place)} or further, but less than {_edge(place + (1 if place > 0 else -1))}"
    far = 2 ** abs(place) - 1
    return f"{_edge(place)} to {far}" if place > 0 else f"-{far} to {_edge(place)}"


def _percent(share: float) -> str:
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return f"{min(max(share, 0.0001), 0.9999):.2%}"
