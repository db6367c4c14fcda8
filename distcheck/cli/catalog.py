"""What there is to choose from, read from source files: nothing is imported."""

import ast
import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path

from distcheck.judge import checks
from distcheck.training import loading
from distcheck.workloads import datasets
from distcheck.workloads.cells import CELLS


def catalog() -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, [(name, summary)]) for strategies, workloads, cells, data sets and checks."""
    return [
        ("strategies", _of_entry_points(loading.strategy_names())),
        ("workloads", _of_modules(loading.workload_names())),
        ("cells", [(name, cell.about) for name, cell in CELLS.items()]),
        ("data", _of_modules(datasets.dataset_names())),
        ("checks", _of_modules(checks.module_names())),
    ]


def summary_of(module: str, name: str = "") -> str:
    """The first line of a module's docstring, or of a function's or class's in it.

    Read from its source, without importing it.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return "(cannot be found)"
    if spec is None or spec.origin is None:
        return "(cannot be found)"
    tree = ast.parse(Path(spec.origin).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    named = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
    docstring = ast.get_docstring(named[0] if named else tree)
    return docstring.splitlines()[0] if docstring else ""


def _of_entry_points(points: dict[str, EntryPoint]) -> list[tuple[str, str]]:
    """A file that holds one strategy describes it; one that holds several leaves it to them."""
    files = [point.module for point in points.values()]
    return [
        (name, summary_of(p.module, p.attr if files.count(p.module) > 1 else ""))
        for name, p in sorted(points.items())
    ]


def _of_modules(modules: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, summary_of(module)) for name, module in modules.items()]
