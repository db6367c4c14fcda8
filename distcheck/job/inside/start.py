"""Waits until a process of the job has imported torch, then installs the hooks. Imports little,
because it runs at the start of every Python process of the job.
"""

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from distcheck import private
from distcheck.job import in_use
from distcheck.job.inside.marking import (
    MARK,
    is_rank_process,
    launcher_names,
    mark_rank,
    write_note,
)
from distcheck.worlds import pinning

_OF_LAUNCHERS = ("ChildFailedError",)  # torchrun's, for exceptions that ranks note themselves
_OF_SPAWN = "ProcessRaisedException"  # of torch.multiprocessing


def begin(settings: str) -> None:
    """Note that this Python process exists, and wait for the import of torch. Does nothing in child
    processes of a rank.
    """
    in_use.keep_in_use(os.path.dirname(settings))
    own, of = f"{os.getpid()} {launcher_names()}", os.environ.get(MARK, "")
    if of and of != own and of.partition(" ")[2] == launcher_names():
        return
    if launcher_names():
        mark_rank()
    if (pins := os.environ.get(pinning.VARIABLE)) is not None:
        pinning.begin(pins, Path(os.path.dirname(settings)))
    write_note(settings, "python", "\0".join([str(os.getppid()), *sys.orig_argv]))
    _note_what_ends_it(settings)
    if "torch" in sys.modules:
        _install(settings)
    else:
        sys.meta_path.insert(0, _Waiting(settings))
        atexit.register(_note_what_was_missed, settings)


def _note_what_was_missed(settings: str) -> None:
    """Note at exit if torch was imported without the hooks."""
    if "torch" in sys.modules and not _Waiting.has_installed:
        write_note(settings, "missed")


def _note_what_ends_it(settings: str) -> None:
    """Note an exception that ends the process. Python still displays it as usual."""

    def show(kind: Any, error: Any, trace: Any) -> None:
        if kind.__name__ not in _OF_LAUNCHERS:
            _note_raised(settings, error)
        shows(kind, error, trace)

    shows, sys.excepthook = sys.excepthook, show


def _note_raised(settings: str, error: Any) -> None:
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    if "torch" in sys.modules:
        from distcheck.job.inside.rank import rank_and_world_size

        rank = str(rank_and_world_size()[0])
    said = f"{type(error).__name__}: {error}"
    if type(error).__name__ == _OF_SPAWN:  # the traceback of the rank
        said = str(error).strip().rpartition("\n")[2]
    from distcheck.errors.shown_text import text_to_report  # not at the start of every Python

    said = text_to_report(said)[:2000]  # masked first: a part of a secret is not recognized
    with contextlib.suppress(OSError):
        file = Path(os.path.dirname(settings), f"raised-{os.getpid()}")
        private.write(file, f"{rank}\n{said}\n")


def _note_what_ends_processes(settings: str) -> None:
    """Note exceptions of ranks that multiprocessing has started. It displays them itself, without
    Python's hook.
    """
    from multiprocessing.process import BaseProcess

    runs = BaseProcess.run

    def run(process: BaseProcess) -> None:
        try:
            runs(process)
        except Exception as error:
            distributed = sys.modules.get("torch.distributed")
            if distributed is not None and distributed.is_initialized() and not is_rank_process():
                _note_raised(settings, error)
            raise

    BaseProcess.run = run  # type: ignore[method-assign, assignment]


def _install(settings: str) -> None:
    write_note(settings, "torch")
    try:
        from distcheck.job.inside import install

        install.install(settings)
        _note_what_ends_processes(settings)
        if pinning.VARIABLE in os.environ:
            pinning.pin_torch()
    except Exception:  # the script continues after importing torch
        with contextlib.suppress(OSError):
            private.write(Path(os.path.dirname(settings), "defect"), traceback.format_exc())


class _Waiting(importlib.abc.MetaPathFinder):
    """Import finder that finds torch as usual, and installs the hooks after torch is imported. A
    lookup without an import has no effect.
    """

    has_installed = False

    def __init__(self, settings: str) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if not _Waiting.has_installed:
                _Waiting.has_installed = True
                _install(self._settings)

        loader.exec_module = exec_module
        return spec
