"""The aliases of layers stand in `records/layers.py`; everything else names them from there."""

import ast
from pathlib import Path

import pytest

from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, LAYERS, ROUNDING

PACKAGE = Path(__file__).parents[2] / "distcheck"
ALIASES = {BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64}
LIST = PACKAGE / "records" / "layers.py"
MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != LIST]


def aliases_in(source: str) -> list[int]:
    """The lines with a string that is the alias of a layer."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    return [n.lineno for n in nodes if isinstance(n.value, str) and n.value in ALIASES]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_alias_outside_the_list(path: Path) -> None:
    assert not aliases_in(path.read_text())


def test_an_alias_would_be_found() -> None:
    assert aliases_in('layer == "X"\nkind = "lattice"\nfull = ("S32", "S64")\nflag = b"R"') == [
        1, 3, 3,
    ]  # fmt: skip


def test_the_aliases_of_reports_stay() -> None:
    """JSON, stored cases and the configuration hold these words."""
    assert list(LAYERS) == ["lattice", "X", "R", "S32", "S64"]
    assert (BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64) == ("X", "R", "S32", "S64")
