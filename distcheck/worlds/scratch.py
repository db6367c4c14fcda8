"""Folders for a while, which go even where the process that made them is killed.

A process forked from a helper notes a folder before it makes it, as a link in a place that the
helper knows; the helper outlives all that it has forked, and removes what is noted there.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distcheck import private

_noted: Path | None = None  # set in a helper, and so in all that it forks


def keep_notes() -> None:
    """Called in a helper, before it forks; it calls `remove_noted` at its end."""
    global _noted
    _noted = Path(tempfile.gettempdir(), private.unique(f"distcheck-noted-{os.getpid()}-"))


def remove_noted() -> None:
    """Removes every folder that was noted and is still there, and the notes."""
    if _noted is None or not _noted.is_dir():
        return
    for note in _noted.iterdir():
        shutil.rmtree(os.readlink(note), ignore_errors=True)
    shutil.rmtree(_noted, ignore_errors=True)


@contextlib.contextmanager
def folder(where: Path | None = None, prefix: str = "distcheck-") -> Iterator[Path]:
    """A new folder in `where`, or where temporary files are, until the end of the block. OSError
    where it cannot be made.
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
