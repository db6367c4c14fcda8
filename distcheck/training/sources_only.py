"""Imports from source only, for code that a saved run names.

A compiled copy in `__pycache__` may have a different origin: Python trusts its header, which can
claim any source, whereas the user has read the source next to it. If the user confirmed files, only
the confirmed bytes are loaded, and nothing else from the folders of these files.
"""

import base64
import hashlib
import json
import os
import site
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Mapping
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
from zipimport import zipimporter

from distcheck.errors import UsageError

_VARIABLE = "DISTCHECK_SOURCES_ONLY"
NOTHING = "{}"  # of the variable: sources alone, of whatever files
_MOST_CHARACTERS = 120_000  # Derived: Linux passes on 128 KiB of one variable
OWN_PACKAGES = ("distcheck_strategies", "distcheck_mutants")
_OWN = (Path(__file__).parents[1], Path(__file__).parents[2] / "strategies")
_LIBRARY = f"python{sys.version_info.major}.{sys.version_info.minor}"


def require_sources(
    agreed: Mapping[str, str] = MappingProxyType({}), around: Iterable[str] = ()
) -> None:
    """Make processes that this process starts import from source only.

    `agreed` maps absolute paths of trusted and confirmed files to SHA-256 digests: a file with a
    different digest is not loaded. From the folders of `around`, no further file is loaded. These
    are the folders that foreign code is imported from, and the folder or file that was passed.
    """
    places = [os.path.realpath(one) for one in around if one]
    found = _encoded(agreed, places)
    if len(found) > _MOST_CHARACTERS:  # a large checkout: only what foreign code could reach
        near = {f: d for f, d in agreed.items() if any(map(Path(f).is_relative_to, places))}
        found = _encoded(near, places)
    if len(found) > _MOST_CHARACTERS:
        raise UsageError(
            f"this code imports so many files ({len(agreed):,}) that they cannot be checked while "
            "it runs; review them, then pass --trust"
        )
    os.environ[_VARIABLE] = found


def _encoded(agreed: Mapping[str, str], places: Iterable[str]) -> str:
    text = json.dumps({"agreed": dict(agreed), "around": [*dict.fromkeys(places)]})
    return base64.b64encode(zlib.compress(text.encode())).decode()


def apply_source_only_setting() -> None:
    """Import only from source here, if a starting process called `require_sources`."""
    if not os.environ.get(_VARIABLE) or _hook in sys.path_hooks:
        return
    sys.path_hooks.insert(0, _hook)
    sys.path_importer_cache.clear()


def resolved_link(path: Path) -> Path:
    """Return the resolved path: consent for a path applies to its target, not to a link."""
    place, asked = path.resolve(), _asked()
    if (digest := asked["agreed"].get(os.path.abspath(path))) is not None:
        asked["agreed"][str(place)] = digest
        if os.path.realpath(folder_of_top_package(os.path.abspath(path))) in asked["around"]:
            asked["around"].append(folder_of_top_package(str(place)))
        os.environ[_VARIABLE] = _encoded(asked["agreed"], asked["around"])
    return place


def source_loader(name: str, file: Path) -> SourceFileLoader | None:
    """Return the loader of a file, or None if Python's loader may load it."""
    return _Loader(name, str(file)) if os.environ.get(_VARIABLE) else None


def looks_installed(path: Path) -> bool:
    """Return True if a path looks like that of an installed package of any Python version."""
    return bool({"site-packages", "dist-packages", _LIBRARY} & {*path.parts})


def _trusted_folders() -> frozenset[Path]:
    """Return the folders of this Python's own modules, and of packages installed for it."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()}
    found |= {one for one in sys.path if looks_installed(Path(one))}
    return frozenset(place for one in found for place in (Path(one), Path(one).resolve()))


def is_installed(path: Path) -> bool:
    """Return True if a path belongs to an installed package or to the standard library. A folder
    named site-packages is not sufficient: the user may have passed such a folder.
    """
    return any(map(path.is_relative_to, _PLACES))


_PLACES = _trusted_folders()  # before any user folder is in sys.path


class UncheckedCodeError(UsageError, ImportError):
    """Raised for a module that was neither trusted nor listed; importers see it as missing."""


class _Loader(SourceFileLoader):
    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"no compiled copy of {path} is used")

    def get_data(self, path: str) -> bytes:
        return checked_bytes(path, super().get_data(path))


class _ExtensionLoader(ExtensionFileLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        checked_bytes(self.path, Path(self.path).read_bytes())
        return super().create_module(spec)


def checked_bytes(path: str, data: bytes) -> bytes:
    """Return the content of a file that is about to run. Raises UncheckedCodeError."""
    asked, places = _asked(), {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
    digests = {asked["agreed"][str(one)] for one in places if str(one) in asked["agreed"]}
    if digests - {hashlib.sha256(data).hexdigest()}:
        raise UncheckedCodeError(f"{path} has changed since it was checked; run the command again")
    within = (one for one in places for folder in asked["around"] if one.is_relative_to(folder))
    if not digests and any(not any(map(one.is_relative_to, _OWN)) for one in within):
        raise UncheckedCodeError(
            f"{path} is not among the files that were checked before the run; pass --trust to run "
            "it anyway"
        )
    return data


def _asked() -> dict[str, Any]:
    """Return the confirmation that `begin` stored, or an empty one."""
    text = os.environ.get(_VARIABLE)
    if not text or text == NOTHING:
        return {"agreed": {}, "around": []}
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return found


def folder_of_top_package(file: str) -> str:
    folders = Path(file).parents
    return str(next(folder for folder in folders if not (folder / "__init__.py").is_file()))


_finder = FileFinder.path_hook((_ExtensionLoader, EXTENSION_SUFFIXES), (_Loader, SOURCE_SUFFIXES))


def _hook(folder: str) -> Any:
    if is_installed(Path(folder)):
        raise ImportError(folder)
    try:
        return _Archive(folder)  # a zip file, or a folder in one
    except ImportError:
        return _finder(folder)


class _Archive:
    """The finder of a zip file: no digest covers its modules."""

    def __init__(self, file: str) -> None:
        self._file, self._modules = file, zipimporter(file)

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        found = self._modules.find_spec(name, target)
        if found is not None:
            checked_bytes(os.path.join(self._file, name), b"")
        return found
