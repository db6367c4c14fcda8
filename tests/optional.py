"""For tests of parts that may be absent: add-ons (`distcheck/registry.py`), frameworks."""

import importlib.util
from collections.abc import Iterable

import pytest

from distcheck import registry
from tests.sources import PACKAGE


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark that skips a test unless the add-ons are installed."""
    absent = [name for name in names if not registry.is_installed(name)]
    return pytest.mark.skipif(bool(absent), reason=f"add-ons that were removed: {absent}")


def left_of(files: Iterable[str]) -> set[str]:
    """The files of the package, as paths within it, except those of add-ons that were removed."""
    return {file for file in files if not file.startswith("addons/") or (PACKAGE / file).exists()}


needs_all = needs(*registry.ADDONS)


def needs_package(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test unless a package is installed, which it imports in a process."""
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed (extra `frameworks`)")
