"""`distcheck list`: lists strategies, workloads, data sets and checks. It reads their source files
and imports none of them.
"""

import ast
import importlib.util
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import json_option
from distcheck.judge import checks
from distcheck.reports.files import write_answer
from distcheck.training import loading
from distcheck.workloads import datasets
from distcheck.workloads.cells import CELLS


def catalog() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return sections as (heading, [(name, summary)]): strategies, workloads, cells, data sets and
    checks.
    """
    return [
        ("strategies", _entry_point_summaries(loading.strategy_names())),
        ("workloads", _module_summaries(loading.workload_names())),
        ("cells", [(name, cell.about) for name, cell in CELLS.items()]),
        ("data", _module_summaries(datasets.dataset_names())),
        ("checks", _module_summaries(checks.module_names())),
    ]


def summary_of(module: str, name: str = "") -> str:
    """Return the first sentence of the docstring of a module, or of a function or class in it. The
    source is read; the module is not imported.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return "(not found)"
    if spec is None or spec.origin is None:
        return "(not found)"
    tree = ast.parse(Path(spec.origin).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    named = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
    docstring = ast.get_docstring(named[0] if named else tree)
    paragraph = " ".join((docstring or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]


def _entry_point_summaries(points: dict[str, EntryPoint]) -> list[tuple[str, str]]:
    """Return (name, summary) of the strategies that entry points define. If a file has only one
    strategy, its module's docstring describes it; otherwise, each strategy's own docstring does.
    """
    files = [point.module for point in points.values()]
    return [
        (name, summary_of(p.module, p.attr if files.count(p.module) > 1 else ""))
        for name, p in sorted(points.items())
    ]


def _module_summaries(modules: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, summary_of(module)) for name, module in modules.items()]


@click.command("list", cls=OnceCommand)
@json_option("list")
def command(json_file: str | None) -> None:
    """List strategies, workloads, data sets and checks, one line each."""

    found = catalog()
    if write_answer(json_file, "distcheck.list/1", **{name: dict(each) for name, each in found}):
        return
    for heading, entries in found:
        click.echo(heading)
        width = max((len(name) for name, _ in entries), default=0)
        for name, summary in entries:
            click.echo(f"  {name:<{width}}  {summary}")
