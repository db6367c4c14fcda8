"""The sources of distcheck as trees, each read and parsed once for all tests of a process."""

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "distcheck"
MODULES = sorted(PACKAGE.rglob("*.py"))
STRATEGIES = sorted((ROOT / "strategies").glob("*.py"))
Found = TypeVar("Found")


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text_of(path))))


@functools.cache
def calls() -> tuple[tuple[str, str, ast.Call], ...]:
    """Every call in distcheck: its file, the dotted name that is called, and the call."""
    return tuple(
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func), node)
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Call)
    )


def found(paths: Iterable[Path], look: Callable[[Path], Found]) -> dict[str, Found]:
    """What `look` finds in each file, by the file's name; files in which it finds nothing are left
    out.
    """
    return {str(path.relative_to(ROOT)): seen for path in paths if (seen := look(path))}
