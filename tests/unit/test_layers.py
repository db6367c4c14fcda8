"""The aliases of layers stand in `records/layers.py`; everything else names them from there."""

import ast

from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, LAYERS, ROUNDING
from tests.sources import MODULES, PACKAGE, found, text_of

ALIASES = {BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64}
LIST = PACKAGE / "records" / "layers.py"


def aliases_in(source: str) -> list[int]:
    """The lines with a string that is the alias of a layer."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    return [n.lineno for n in nodes if isinstance(n.value, str) and n.value in ALIASES]


def test_no_alias_outside_the_list() -> None:
    others = [path for path in MODULES if path != LIST]
    assert not found(others, lambda path: aliases_in(text_of(path)))


def test_an_alias_would_be_found() -> None:
    assert aliases_in('layer == "bitwise"\nkind = "lattice"\nfull = ("full batch float32", "full batch float64")\nflag = b"R"') == [
        1, 3, 3,
    ]  # fmt: skip


def test_the_aliases_of_reports_stay() -> None:
    """JSON, stored cases and the configuration hold these words."""
    assert list(LAYERS) == [
        "lattice",
        "bitwise",
        "rounding",
        "full batch float32",
        "full batch float64",
    ]
    assert (BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64) == (
        "bitwise",
        "rounding",
        "full batch float32",
        "full batch float64",
    )
