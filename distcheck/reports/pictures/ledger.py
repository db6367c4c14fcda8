"""The bytes of a step's collectives as bars, and the bytes of the gradients as their measure."""

from distcheck.records.ledger import HEADS, Ledger, table_of
from distcheck.reports.pictures import Drawing, Picture, Table, cell

_LABEL, _TOP, _ROW, _MOST = 240, 8, 22, 16


def draw(name: str, ledger: Ledger) -> Picture:
    """Draw the largest rows; the table has all of them."""
    drawing, rows = Drawing(name, 700), ledger.rows[:_MOST]
    table = table_of(ledger)
    largest = max(ledger.gradient_bytes, 1, *(row.bytes for row in rows))
    per_byte = (drawing.width - _LABEL - 80) / largest
    for number, (row, shown) in enumerate(zip(rows, table, strict=False)):
        y = _TOP + _ROW * number
        label = f"{row.operation} {row.dtype}, {shown[1]}"
        drawing.text(_LABEL - 6, y + 14, label[:40], end="end")
        drawing.path("bar", cell(_LABEL, y + 2, max(1.0, row.bytes * per_byte), _ROW - 7.0))
        drawing.text(_LABEL + row.bytes * per_byte + 5, y + 14, shown[4], kind="faint")
    bottom = _TOP + _ROW * len(rows)
    if ledger.gradient_bytes:
        x = _LABEL + ledger.gradient_bytes * per_byte
        drawing.path("required", f"M{x:.1f} {_TOP}V{bottom}")
        drawing.text(x, bottom + 12, "bytes of the gradients", kind="faint", end="middle")
    title, says = "Collectives of a step", f"Rank 0, {ledger.in_words()}."
    svg = drawing.markup(bottom + 20, title=title, says=says)
    return Picture(title, says, svg, Table(list(HEADS), table))
