"""Imports of sources alone, for code that a saved run names.

A compiled copy in `__pycache__` may come from elsewhere as well. Python believes its header, which
can claim any source; the person has read the source next to it.
"""

import os
import sys
from collections.abc import Mapping
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path
from typing import Any

_VARIABLE = "DISTCHECK_SOURCES_ONLY"
_LIBRARY = f"python{sys.version_info.major}.{sys.version_info.minor}"


def begin() -> None:
    """Make the processes that this one starts from now on import sources alone."""
    os.environ[_VARIABLE] = "1"


def follow_environment() -> None:
    """Make this process compile every module itself that is not installed, if a command that
    started it has called `begin`.
    """
    if not os.environ.get(_VARIABLE) or _hook in sys.path_hooks:
        return
    sys.path_hooks.insert(0, _hook)
    sys.path_importer_cache.clear()


def loader(name: str, file: Path) -> SourceFileLoader | None:
    """Return the loader of a file, or None for Python's own."""
    return _Loader(name, str(file)) if os.environ.get(_VARIABLE) else None


def is_installed(path: Path) -> bool:
    """Return True if a path belongs to an installed package or to the standard library."""
    return bool({"site-packages", "dist-packages", _LIBRARY} & {*path.parts})


class _Loader(SourceFileLoader):
    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"no compiled copy of {path} is used")


_finder = FileFinder.path_hook(
    (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Loader, SOURCE_SUFFIXES)
)


def _hook(folder: str) -> Any:
    if is_installed(Path(folder)):
        raise ImportError(folder)
    return _finder(folder)
