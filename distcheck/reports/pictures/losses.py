"""The loss of every rank over the reference's, and the difference of their mean."""

from distcheck.records.layers import shown_layer
from distcheck.reports.document import CheckEntry
from distcheck.reports.pictures import (
    Drawing,
    NumberAxis,
    Picture,
    Table,
    figure,
    labels,
    line,
    plural,
    point,
    ticks,
)

_LEFT, _UPPER, _LOWER, _BETWEEN, _TOP = 64, 130, 60, 30, 8
_MOST_NUMBERED_STEPS = 400


def draw(name: str, check: CheckEntry) -> Picture:
    """Draw ranks, mean and reference; below, mean minus reference, with the bound."""
    found = check.loss
    assert found
    steps, ranks = found.steps, [list(map(float, rank)) for rank in found.ranks]
    mean, expected, bound = (
        list(map(float, numbers)) for numbers in (found.mean, found.expected, found.bound)
    )
    off = [a - e for a, e in zip(mean, expected, strict=True)]
    drawing = Drawing(name, 320 if len(steps) <= 20 else 700)
    right = drawing.width - 26

    def x(at: int) -> float:
        return _LEFT + (right - _LEFT) * ((at + 0.5) / len(steps))

    upper = NumberAxis([*(v for rank in ranks for v in rank), *expected], _TOP, _UPPER)
    lower = NumberAxis([*off, *bound, *(-b for b in bound), 0.0], _TOP + _UPPER + _BETWEEN, _LOWER)
    for scale in (upper, lower):
        for value in scale.marks:
            y = scale(value) or 0.0
            drawing.path("axis", f"M{_LEFT} {y:.1f}H{right}")
            drawing.text(_LEFT - 6, y + 4, scale.figure(value), kind="faint", end="end")
    band = [(x(i), lower(b)) for i, b in enumerate(bound)]
    band += [(x(i), lower(-b)) for i, b in reversed(list(enumerate(bound)))]
    if any(bound) and len(steps) > 1:
        drawing.path("band", line([point(*p) for p in band]) + "z")
    for rank in ranks:
        drawing.path("rank", line([point(x(i), upper(v)) for i, v in enumerate(rank)]))
    drawing.path("required", line([point(x(i), upper(v)) for i, v in enumerate(expected)]))
    apart = [i for i, (o, b) in enumerate(zip(off, bound, strict=True)) if not abs(o) <= b]
    drawing.path(
        "off" if apart else "within", line([point(x(i), lower(v)) for i, v in enumerate(off)])
    )
    bottom = _TOP + _UPPER + _BETWEEN + _LOWER
    for i in ticks(len(steps), 10):
        drawing.text(x(i), bottom + 14, str(steps[i]), kind="faint", end="middle")
    drawing.text(_LEFT - 6, bottom + 14, "step", kind="faint", end="end")
    drawing.text(_LEFT, _TOP + _UPPER + _BETWEEN - 6, "mean - reference", kind="faint")
    for number, place in labels([upper(rank[-1]) for rank in ranks]):
        drawing.text(right + 3, place + 4, str(number), kind="faint")
    drawing.text(right + 16, _TOP + _UPPER + 14, "rank", kind="faint", end="end")
    title = f"Loss of {len(ranks)} ranks and of the reference ({shown_layer(check.layer)})"
    says = (
        f"The mean over the ranks exceeds its bound at step {steps[apart[0]]}, and at "
        f"{len(apart)} of "
        f"{plural(len(steps), 'step')} in all."
        if apart
        else "The mean over the ranks is within its bound"
        + (f" at all {len(steps)} steps." if len(steps) > 1 else ".")
    )
    says += " Thin lines: ranks, numbered at the right if there is room. Dashed line: reference."
    says += " Below: their mean minus the reference"
    says += ", shaded: the bound." if any(bound) else "; the bound is 0."
    stride = -(-len(steps) // _MOST_NUMBERED_STEPS)
    rows = [
        [str(steps[i]), f"{mean[i]:.9g}", f"{expected[i]:.9g}", figure(off[i]), figure(bound[i])]
        for i in range(0, len(steps), stride)
    ]
    table = Table(["step", "mean of ranks", "reference", "difference", "bound"], rows)
    return Picture(title, says, drawing.markup(bottom + 20, title=title, says=says), table)
