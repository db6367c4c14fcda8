"""Values that a shell can complete. Asked at every press of a key, so nothing heavy is imported.

A value goes into the command line as it is: a name that a shell would not read as one plain word
(a folder `;command`) is not proposed.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], Sequence[CompletionItem]]


def _of(names: Callable[[], Iterable[str]], *, files: bool = False) -> dict[str, Any]:
    """The argument of a click option that completes to these names, or to files as well."""

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> Sequence[CompletionItem]:
        found = [
            CompletionItem(name)
            for name in names()
            if name.startswith(incomplete) and shlex.quote(name) == name
        ]
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

    return {"shell_complete": complete}


def _strategies() -> Iterable[str]:
    from distcheck.training import loading

    return sorted(loading.strategy_names())


def _workloads() -> Iterable[str]:
    from distcheck.training import loading

    return sorted(loading.workload_names())


def _backends() -> Iterable[str]:
    from distcheck import backends

    return backends.names_with_orders()


def _dtypes() -> Iterable[str]:
    from distcheck.plan.cases import DTYPES

    return DTYPES


def _devices() -> Iterable[str]:
    from distcheck.machine.devices import DEVICES

    return DEVICES


def _data() -> Iterable[str]:
    from distcheck.workloads.datasets import dataset_names

    return dataset_names()


def _forms() -> Iterable[str]:
    from distcheck.training.adapters import form_names

    return form_names()


def _losses() -> Iterable[str]:
    from distcheck.training.adapters.asked import LOSSES

    return LOSSES


def _cells() -> Iterable[str]:
    from distcheck.workloads.cells import CELLS

    return CELLS


def _runs() -> Iterable[str]:
    from distcheck.store.run_folder import kept_runs

    return [str(folder) for folder in kept_runs()]


STRATEGIES, WORKLOADS = _of(_strategies, files=True), _of(_workloads, files=True)
BACKENDS, DTYPES, DEVICES, DATA = _of(_backends), _of(_dtypes), _of(_devices), _of(_data)
FORMS, LOSSES, CELLS = _of(_forms), _of(_losses), _of(_cells)
RUNS = _of(_runs, files=True)
