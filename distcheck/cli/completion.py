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


def of(names: Callable[[], Iterable[str]], *, files: bool = False) -> dict[str, Any]:
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


def _runs() -> Iterable[str]:
    from distcheck.store.run_folder import kept_runs

    return [str(folder) for folder in kept_runs()]


RUNS = of(_runs, files=True)
