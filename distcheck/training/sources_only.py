"""Imports of sources alone, for code that a saved run names.

A compiled copy in `__pycache__` may come from elsewhere as well. Python believes its header, which
can claim any source; the person has read the source next to it. Of files that the person was asked
about, the bytes that they were asked about are loaded, or none.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

_VARIABLE = "DISTCHECK_SOURCES_ONLY"
_LIBRARY = f"python{sys.version_info.major}.{sys.version_info.minor}"


def begin(agreed: Mapping[str, str] = MappingProxyType({})) -> None:
    """Make the processes that this one starts from now on import sources alone. `agreed` has the
    SHA-256 digests of files by their absolute paths: none is loaded that has another one then.
    """
    os.environ[_VARIABLE] = json.dumps(dict(agreed))


def follow_environment() -> None:
    """Make this process compile every module itself that is not installed, if a command that
    started it has called `begin`.
    """
    if not os.environ.get(_VARIABLE) or _hook in sys.path_hooks:
        return
    sys.path_hooks.insert(0, _hook)
    sys.path_importer_cache.clear()


def followed(path: Path) -> Path:
    """Return the place that a path leads to. What is loaded from there is held to what was agreed
    for the path: a link may have taken the place of the file.
    """
    place = path.resolve()
    agreed = json.loads(os.environ.get(_VARIABLE, "{}"))
    if (digest := agreed.get(os.path.abspath(path))) is not None:
        begin({**agreed, str(place): digest})
    return place


def loader(name: str, file: Path) -> SourceFileLoader | None:
    """Return the loader of a file, or None for Python's own."""
    return _Loader(name, str(file)) if os.environ.get(_VARIABLE) else None


def is_installed(path: Path) -> bool:
    """Return True if a path belongs to an installed package or to the standard library."""
    return bool({"site-packages", "dist-packages", _LIBRARY} & {*path.parts})


class _Loader(SourceFileLoader):
    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"no compiled copy of {path} is used")

    def get_data(self, path: str) -> bytes:
        return checked(path, super().get_data(path))


class _ExtensionLoader(ExtensionFileLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        checked(self.path, Path(self.path).read_bytes())
        return super().create_module(spec)


def checked(path: str, data: bytes) -> bytes:
    """Return the content of a file that is to run. Raises ImportError if it was not agreed to."""
    agreed = json.loads(os.environ.get(_VARIABLE, "{}")).get(os.path.abspath(path))
    if agreed not in (None, hashlib.sha256(data).hexdigest()):
        raise ImportError(f"{path} has changed since you were asked about it; run this again")
    return data


_finder = FileFinder.path_hook((_ExtensionLoader, EXTENSION_SUFFIXES), (_Loader, SOURCE_SUFFIXES))


def _hook(folder: str) -> Any:
    if is_installed(Path(folder)):
        raise ImportError(folder)
    return _finder(folder)
