"""The names of layers stand in `records/layers.py`; other modules use its constants."""

import ast

from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, LAYERS, ROUNDING
from tests.sources import MODULES, PACKAGE, found, text_of

NAMES = {BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64}
LIST = PACKAGE / "records" / "layers.py"


def names_in(source: str) -> list[int]:
    """Return the lines with a string that is the name of a layer, and of nothing else."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    return [n.lineno for n in nodes if isinstance(n.value, str) and n.value in NAMES]


def test_no_name_outside_the_list() -> None:
    others = [path for path in MODULES if path != LIST]
    assert not found(others, lambda path: names_in(text_of(path)))


def test_a_name_would_be_found() -> None:
    source = 'layer == "bitwise"\nkind = "exact"\nfull = ("full batch float32", "rounding")'
    assert names_in(source) == [1, 3, 3]


def test_the_names_of_reports_stay() -> None:
    """JSON, stored cases, screens and pages use these names."""
    assert list(LAYERS) == [
        "exact", "bitwise", "rounding", "full batch float32", "full batch float64",
    ]  # fmt: skip
    assert list(LAYERS)[1:] == [BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64]
