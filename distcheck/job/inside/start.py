"""Waits until a process of the job has imported torch, and then installs the hooks.

Imports little: it runs at the start of every Python that the job starts.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from distcheck.job import in_use

_OF_LAUNCHERS = ("ChildFailedError",)  # torchrun's, of what a rank has raised and noted itself
_OF_SPAWN = "ProcessRaisedException"  # of torch.multiprocessing


def begin(settings: str) -> None:
    """Leaves a note that this Python was reached, and waits for torch."""
    in_use.hold(os.path.dirname(settings))
    note(settings, "python")
    _note_what_ends_it(settings)
    if "torch" in sys.modules:
        _install(settings)
    else:
        sys.meta_path.insert(0, _Waiting(settings))


def note(settings: str, what: str) -> None:
    """Leaves a file for the front: it says what a process reached before it ended."""
    with contextlib.suppress(OSError):  # the front says that nothing was recorded
        Path(os.path.dirname(settings), f"{what}-{os.getpid()}").touch()


def _note_what_ends_it(settings: str) -> None:
    """Notes an exception that ends the process, which is still shown as usual."""

    def show(kind: Any, error: Any, trace: Any) -> None:
        rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
        if kind.__name__ in _OF_LAUNCHERS:
            shows(kind, error, trace)
            return
        said = f"{kind.__name__}: {error}"[:2000]
        if kind.__name__ == _OF_SPAWN:  # the traceback of the rank
            said = str(error).strip().rpartition("\n")[2][:2000]
        with contextlib.suppress(OSError):
            file = Path(os.path.dirname(settings), f"raised-{os.getpid()}")
            file.write_text(f"{rank}\n{said}\n", errors="backslashreplace")
        shows(kind, error, trace)

    shows, sys.excepthook = sys.excepthook, show


def _install(settings: str) -> None:
    note(settings, "torch")
    from distcheck.job.inside import install

    install.install(settings)


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and installs the hooks after its import."""

    def __init__(self, settings: str) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _install(self._settings)

        loader.exec_module = exec_module
        return spec
