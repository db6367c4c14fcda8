"""Writes docs/layers.svg: the packages of distcheck by the layer contract in pyproject.toml.

python docs/make_layers.py [FILE]
"""

import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "layers.svg"
# The bands of the drawing, top to bottom; each package of the contract belongs to exactly one.
BANDS = {
    "Commands": "__main__ addons cli integrations compare job testing",
    "Run": "verification store plan reports",
    "Judge": "judge",
    "Ranks": "training recordings workloads worlds backends machine",
    "Shared": "contract records registry errors private",
}
_WIDTH, _LEFT, _ROW, _GAP, _BOX = 760, 110, 34, 10, 26
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24; }
.band { fill: #eef1f4; } .box { fill: #ffffff; stroke: #59636e; } .name { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .band { fill: #21262d; } .box { fill: #0d1117; stroke: #8b949e; }
}"""


def layers() -> list[list[str]]:
    """The rows of the contract, top to bottom; packages of one row do not import each other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = [
        one for one in project["tool"]["importlinter"]["contracts"] if one["type"] == "layers"
    ]
    return [[name.strip() for name in row.split("|")] for row in contract["layers"]]


def drawing() -> str:
    """The SVG; raises ValueError if a package of the contract has no band or is out of order."""
    rows = layers()
    bands = {package: band for band, packages in BANDS.items() for package in packages.split()}
    if set(bands) != {package for row in rows for package in row}:
        raise ValueError("BANDS and the layer contract of pyproject.toml name different packages")
    order = [list(BANDS).index(bands[package]) for row in rows for package in row]
    if order != sorted(order):
        raise ValueError("a band of BANDS is not contiguous in the layer contract")
    parts, y, height = [], 0, _ROW * len(rows) + (2 * _GAP) * len(BANDS)
    for band in BANDS:
        own = [row for row in rows if bands[row[0]] == band]
        tall = _ROW * len(own) + _GAP
        parts.append(f'<rect class="band" x="0" y="{y}" width="{_WIDTH}" height="{tall}" rx="4"/>')
        parts.append(f'<text class="name" x="12" y="{y + tall / 2 + 5:g}">{escape(band)}</text>')
        for number, row in enumerate(own):
            wide = (_WIDTH - _LEFT - _GAP * len(row)) / len(row)
            top = y + _GAP + _ROW * number
            for place, package in enumerate(row):
                left = _LEFT + place * (wide + _GAP)
                parts.append(
                    f'<rect class="box" x="{left:g}" y="{top - 1}" width="{wide:g}" '
                    f'height="{_BOX}" rx="3"/><text text-anchor="middle" '
                    f'x="{left + wide / 2:g}" y="{top + 17}">{escape(package)}</text>'
                )
        y += tall + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height - _GAP}" '
        f'role="img" aria-label="The layers of distcheck">\n<style>{_STYLE}\n</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PICTURE).write_text(drawing())
