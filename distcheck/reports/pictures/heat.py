"""Draws error relative to bound by parameter and step and, in a separate picture, the places whose
bits differ.
"""

from collections.abc import Sequence

from distcheck.records import CheckResult, ErrorMap
from distcheck.records.layers import layer_label
from distcheck.reports.pictures import (
    Drawing,
    Picture,
    Table,
    cell,
    cross,
    figure,
    plural,
    shorten_middle,
    ticks,
)

_LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)  # upper ends, as fractions of the bound
_TOP = 4
_ROW, _DENSE_ROW, _DENSE_FROM = 14, 11, 24  # row heights; the smaller from so many rows on
_LETTER = 6.2  # width of a label's letter
_LABEL_LETTERS = 27


def draw_bound(name: str, check: CheckResult) -> Picture:
    found = check.map
    assert found
    shares = [[None if c == "-" else float(c) for c in row.split()] for row in found.rows]
    grid = _Grid(name, found)
    paths: list[list[str]] = [[] for _ in range(len(_LEVELS) + 1)]
    crosses = []
    worst, over = (-1.0, 0, 0), 0
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            if share is None:
                continue
            level = _level_of(share)
            paths[level].append(grid.cell(x, y))
            if level == len(_LEVELS):
                over += 1
                crosses.append(grid.cross(x, y))
            worst = max(worst, (share, y, x), key=lambda w: w[0])
    for level, cells in enumerate(paths):
        grid.drawing.path(f"h{level}" if level < len(_LEVELS) else "over", "".join(cells))
    grid.drawing.path("cross", "".join(crosses))
    height = _legend(grid.drawing, grid.bottom + 26)
    where = f"{found.parameters[worst[1]]}, step {found.steps[worst[2]]}"
    says = (
        f"{plural(over, 'cell')} exceed{'s' * (over == 1)} the bound. "
        if over
        else "Every cell is within its bound. "
    )
    says += f"The largest ratio of error to bound is {figure(worst[0])}, at {where}."
    title = f"Error / bound: {check.check}{layer_in_label(check)}"
    rows = [
        [label, *("" if share is None else figure(share) for share in row)]
        for label, row in zip(found.parameters, shares, strict=True)
    ]
    heads = ["parameter", *(f"step {step}" for step in found.steps)]
    svg = grid.drawing.markup(height, title=title, says=says)
    return Picture(title, says, svg, Table(heads, rows), _note_on_grouping(found))


def draw_bits(name: str, check: CheckResult) -> Picture:
    found = check.map
    assert found
    grid = _Grid(name, found)
    same, differs, crosses = [], [], []
    rows = []
    for y, row in enumerate(found.rows):
        for x, letter in enumerate(row):
            if letter == "=":
                same.append(grid.cell(x, y))
            elif letter == "x":
                differs.append(grid.cell(x, y))
                crosses.append(grid.cross(x, y))
        steps = [found.steps[x] for x, letter in enumerate(row) if letter == "x"]
        if steps:
            rows.append([found.parameters[y], ", ".join(map(str, steps))])
    grid.drawing.path("same", "".join(same))
    grid.drawing.path("over", "".join(differs))
    grid.drawing.path("cross", "".join(crosses))
    y = grid.bottom + 26
    for x, kind, words in ((0, "same", "bit-identical"), (120, "over", "bits differ")):
        grid.drawing.path(kind, cell(x, y, 12, 12))
        grid.drawing.text(x + 17, y + 10, words, kind="faint")
    grid.drawing.path("cross", cross(120, y, 12, 12))
    total = len(same) + len(differs)
    says = f"{len(same)} of {plural(total, 'cell')} are bit-identical."
    says += f" {len(differs)} differ{'s' * (len(differs) == 1)}." if differs else ""
    title = f"Bits: {check.check}{layer_in_label(check)}"
    svg = grid.drawing.markup(y + 16, title=title, says=says)
    table = Table(["parameter", "steps that are not bit-identical"], rows)
    return Picture(title, says, svg, table, _note_on_grouping(found))


class _Grid:
    """Rows of parameters by columns of steps, with their labels."""

    def __init__(self, name: str, found: ErrorMap) -> None:
        steps, parameters = found.steps, found.parameters
        longest = max((len(label) for label in parameters), default=0)
        self._left = 12 + _LETTER * min(_LABEL_LETTERS, longest)
        self.drawing = Drawing(name, int(self._left + 12 * len(steps)))
        room = self.drawing.width - self._left - 8
        self._row = _DENSE_ROW if len(parameters) >= _DENSE_FROM else _ROW
        self._width = max(1.0, min(24.0, room / max(1, len(steps))))
        self._gap = 1.0 if self._width > 4 else 0.3
        self.bottom = _TOP + self._row * len(parameters)
        for y, label in enumerate(parameters):
            at = _TOP + self._row * (y + 1) - (self._row - 6) / 2
            self.drawing.text(self._left - 6, at, shorten_middle(label, _LABEL_LETTERS), end="end")
        self._axis(steps)

    def _axis(self, steps: Sequence[int]) -> None:
        for x in ticks(len(steps), 12):
            middle = self._left + self._width * (x + 0.5)
            self.drawing.text(middle, self.bottom + 13, str(steps[x]), kind="faint", end="middle")
        self.drawing.text(self._left - 6, self.bottom + 13, "step", kind="faint", end="end")

    def cell(self, x: int, y: int) -> str:
        return cell(*self._cell_box(x, y))

    def cross(self, x: int, y: int) -> str:
        return cross(*self._cell_box(x, y))

    def _cell_box(self, x: int, y: int) -> tuple[float, float, float, float]:
        left = self._left + self._width * x
        return left, _TOP + self._row * y, self._width - self._gap, self._row - 1


def layer_in_label(check: CheckResult) -> str:
    """Return the layer in the label of a check, which follows a comma; empty if there is none."""
    name = layer_label(check.layer)
    return f", {name}" if name else ""


def _level_of(share: float) -> int:
    for level, end in enumerate(_LEVELS):
        if share <= end:
            return level
    return len(_LEVELS)


def _legend(drawing: Drawing, y: float) -> float:
    """Draw the levels with their upper limits. Return the height of the picture."""
    for level, end in enumerate(_LEVELS):
        x = 34.0 * level
        drawing.path(f"h{level}", cell(x, y, 33, 10))
        drawing.text(x + 33, y + 22, f"{end:g}", kind="faint", end="end")
    drawing.path("over", cell(212, y, 33, 10))
    drawing.path("cross", cross(223, y, 11, 10))
    drawing.text(250, y + 9, "over", kind="faint")
    return y + 28


def _note_on_grouping(found: ErrorMap) -> str:
    tall, wide = found.parameters_per_row, found.steps_per_column
    if tall == wide == 1:
        return ""
    return f"Each cell shows the worst of {plural(tall, 'parameter')} and {plural(wide, 'step')}."
