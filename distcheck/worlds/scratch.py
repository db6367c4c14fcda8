"""Temporary folders that are removed even if the process that created them is killed.

A process that a helper has forked registers a folder before it creates the folder, by a symlink in
a place that the helper knows. The helper outlives its forks, and removes all registered folders.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distcheck import private

_noted: Path | None = None  # set in a helper, and inherited by its forks


def prepare_registration() -> None:
    """Prepare the registration of folders. Called in a helper before it forks."""
    global _noted
    _noted = Path(tempfile.gettempdir(), private.unique(f"distcheck-noted-{os.getpid()}-"))


def remove_registered() -> None:
    """Remove every registered folder that still exists, and the registration itself."""
    if _noted is None or not _noted.is_dir():
        return
    for note in _noted.iterdir():
        shutil.rmtree(os.readlink(note), ignore_errors=True)
    shutil.rmtree(_noted, ignore_errors=True)


@contextlib.contextmanager
def folder(where: Path | None = None, prefix: str = "distcheck-") -> Iterator[Path]:
    """Yield a new folder in `where`, or in the temporary directory, and remove it afterwards.
    Raises OSError if it cannot be created.
    """
    made = Path(where or tempfile.gettempdir()).absolute() / private.unique(prefix)
    note = None if _noted is None else _noted / made.name
    if note is not None:
        private.folder(note.parent)
        note.symlink_to(made)
    try:
        private.folder(made, is_new=True)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if note is not None:
            note.unlink(missing_ok=True)
