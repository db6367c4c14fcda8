"""Unit roundoffs have one place; every small constant of a judgment says where it comes from."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distcheck.machine import numerics
from tests.sources import MODULES, PACKAGE, ROOT, found, text_of

NUMERICS = PACKAGE / "machine" / "numerics.py"
JUDGING = sorted((PACKAGE / "judge").rglob("*.py"))
PAGE = ROOT / "docs" / "what-equal-means.md"
UNIT_EXPONENTS = (8, 11, 24, 53)  # 2^-k is the unit roundoff of bfloat16, float16, float32, float64
LEAST_PLAIN = 1e-2  # from here on a number is a share or a count, not a tolerance
ORIGIN = re.compile(r"\b(derived|measured|heuristic)\b", re.IGNORECASE)


def negative_exponent(node: ast.AST) -> int | None:
    """k where the node is 2.0**-k."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        return None
    base, power = node.left, node.right
    if not (isinstance(base, ast.Constant) and base.value == 2):
        return None
    if not (isinstance(power, ast.UnaryOp) and isinstance(power.op, ast.USub)):
        return None
    inner = power.operand
    return inner.value if isinstance(inner, ast.Constant) and isinstance(inner.value, int) else None


def unit_roundoffs(source: str) -> Iterator[int]:
    """The lines that name a unit roundoff, as a power of two or by torch's own table."""
    if not re.search(r"finfo|eps|\*\*", source):
        return
    for node in ast.walk(ast.parse(source)):
        of_torch = isinstance(node, ast.Attribute) and node.attr in ("finfo", "eps", "epsilon")
        of_torch = of_torch and ast.unparse(node) != "self.eps"  # a layer's own
        if isinstance(node, ast.expr) and (of_torch or negative_exponent(node) in UNIT_EXPONENTS):
            yield node.lineno


def small(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        return 0 < abs(node.value) < LEAST_PLAIN
    exponent = negative_exponent(node)
    return exponent is not None and 2.0**-exponent < LEAST_PLAIN


def comment_of(line: str) -> str:
    return line.partition("#")[2]


def beside(lines: list[str], lineno: int) -> str:
    """The comment on a line, and the lines of comment directly above it."""
    found, above = [comment_of(lines[lineno - 1])], lineno - 2
    while above >= 0 and lines[above].lstrip().startswith("#"):
        found.insert(0, comment_of(lines[above]))
        above -= 1
    return " ".join(" ".join(found).split())


def small_constants(source: str) -> Iterator[tuple[str, str]]:
    """Every small constant, as it is written, and the comment beside it."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr) and small(node):
            yield ast.get_source_segment(source, node) or "", beside(lines, node.lineno)


def numbers_of_the_module(source: str) -> Iterator[tuple[str, str]]:
    """Every constant of a module that is a number, and the comment beside it."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and all(
            isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
            for part in ast.walk(node.value)
        ):
            values = [p.value for p in ast.walk(node.value) if isinstance(p, ast.Constant)]
            if all(isinstance(value, float) for value in values):
                yield ast.unparse(node.targets[0]), beside(lines, node.lineno)


def test_unit_roundoffs_are_named_in_one_place() -> None:
    others = [path for path in MODULES if path != NUMERICS]
    assert not found(others, lambda path: list(unit_roundoffs(text_of(path))))


def test_small_constants_say_where_they_come_from() -> None:
    def without_origin(path: Path) -> list[str]:
        numbers = [*small_constants(text_of(path)), *numbers_of_the_module(text_of(path))]
        return [text for text, comment in numbers if not ORIGIN.search(comment)]

    assert not found(JUDGING, without_origin)


def test_a_constant_without_a_word_would_be_found() -> None:
    assert list(unit_roundoffs("x = 2.0**-24")) == [1]
    assert list(unit_roundoffs("x = torch.finfo(d).eps")) != []
    assert list(small_constants("near = a < 1e-6 * b  # small")) == [("1e-6", "small")]
    assert not ORIGIN.search(beside(["# why", "", "x = 1e-6"], 3))
    assert list(small_constants("x = 2.0**-40\ny = 0.5\nz = 0.0")) == [("2.0**-40", "")]
    assert list(numbers_of_the_module("C = 100.0\nD = 3")) == [("C", "")]


def not_derived() -> Iterator[tuple[str, str]]:
    """The constants of expectations and checks that are not derived, each with its file."""
    for path in [p for p in JUDGING if p.parent.name in ("oracles", "checks")]:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            comment = beside(lines, number).lower()
            if line.lstrip().startswith("#") or "derived" in comment:
                continue
            if re.match("(measured|heuristic)[,:]", comment):
                for text in re.findall(r"\d+e-\d+|32 \* 32|\d+\.\d+", line.partition("#")[0]):
                    yield path.name, text


def test_the_page_lists_all_that_is_not_derived() -> None:
    section = PAGE.read_text().partition("## Measured constants")[2]
    rows = [row for row in section.partition("\n## ")[0].splitlines() if row.startswith("| `")]
    listed = {
        (row.split("|")[2].strip(" `"), text)
        for row in rows
        for text in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    assert listed == set(not_derived())


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "complex64"])
def test_the_numbers_are_those_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    table = torch.finfo(dtype)
    assert numerics.unit_roundoff(name) == numerics.unit_roundoff(dtype) == table.eps / 2
    assert numerics.spacing(dtype) == table.eps
    assert numerics.smallest(dtype) == float(table.smallest_normal) * table.eps
