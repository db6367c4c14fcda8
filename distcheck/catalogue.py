"""What there is to choose from, read from source files: nothing is imported."""

from importlib.metadata import EntryPoint

from distcheck import checks, datasets, loading
from distcheck.cells import CELLS


def catalogue() -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, [(name, summary)]) for strategies, workloads, cells, data sets and checks."""
    return [
        ("strategies", _of_entry_points(loading.strategy_names())),
        ("workloads", _of_modules(loading.workload_names())),
        ("cells", [(name, cell.about) for name, cell in CELLS.items()]),
        ("data", _of_modules(datasets.dataset_names())),
        ("checks", _of_modules(checks.module_names())),
    ]


def _of_entry_points(points: dict[str, EntryPoint]) -> list[tuple[str, str]]:
    """A file that holds one strategy describes it; one that holds several leaves it to them."""
    files = [point.module for point in points.values()]
    return [
        (name, loading.summary_of(p.module, p.attr if files.count(p.module) > 1 else ""))
        for name, p in sorted(points.items())
    ]


def _of_modules(modules: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, loading.summary_of(module)) for name, module in modules.items()]
