"""What there is to choose from, read from source files: nothing is imported."""

from importlib.metadata import EntryPoint

from distcheck import checks, datasets, loading


def catalogue() -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, [(name, summary)]) for strategies, workloads, data sets and checks."""
    strategies = sorted(loading.strategy_names().items())
    return [
        ("strategies", [(name, _of_entry_point(point)) for name, point in strategies]),
        ("workloads", _of_modules(loading.workload_names())),
        ("data", _of_modules(datasets.dataset_names())),
        ("checks", _of_modules(checks.module_names())),
    ]


def _of_entry_point(point: EntryPoint) -> str:
    return loading.summary_of(point.module)


def _of_modules(modules: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, loading.summary_of(module)) for name, module in modules.items()]
