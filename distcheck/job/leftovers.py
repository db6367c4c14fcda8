"""Removes the folders of killed jobs at the start of the next one."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distcheck import private
from distcheck.job import in_use
from distcheck.worlds import scratch

PREFIX = "distcheck-job-"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yield a new folder for a job, and remove it at the end. Leftover folders are
    removed first.
    """
    clear()
    with scratch.folder(prefix=PREFIX) as made:
        with contextlib.suppress(OSError):  # a file system without locks: it is not cleared later
            in_use.begin(str(made))
        yield made


def clear() -> None:
    """Remove this user's folders that no process uses."""
    with contextlib.suppress(OSError):
        for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if private.is_private_folder(found, strictly=True) and in_use.is_free(str(found)):
                    shutil.rmtree(found, ignore_errors=True)
