"""Strategies that are given as objects: the names that ranks import them by."""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distcheck.errors import UsageError
from distcheck.verification.copied_source import copied, is_running_unguarded


def names_of(
    strategy: str | os.PathLike[str] | Callable[..., Any] | Sequence[str],
) -> tuple[str, ...]:
    """Names as they are, and the one name of an object.

    Raises UsageError for an object that ranks would not find under its name: they import its
    module afresh, and would judge what stands there. Of a notebook its source is copied.
    """
    if isinstance(strategy, str | os.PathLike):
        return (os.fspath(strategy),)
    if isinstance(strategy, Iterable) and not callable(strategy):
        names = list(strategy)
        if names and all(isinstance(name, str | os.PathLike) for name in names):
            return tuple(os.fspath(name) for name in names)
    if not callable(strategy):
        raise UsageError(
            f"strategy {strategy!r} is of a type that is not supported; give a name, "
            '"path/to/file.py:object", a function or class, or several names'
        )
    module, name = getattr(strategy, "__module__", ""), getattr(strategy, "__qualname__", "")
    if not module or not name or "<" in name:
        raise UsageError(
            f"strategy {strategy!r} has no name that ranks could import; define it at the top "
            'level of a module, or give "path/to/file.py:object"'
        )
    if not _is(strategy, _found(module, name)):
        raise UsageError(
            f"strategy {strategy!r} is not the object that ranks find as {name} in {module}; "
            'assign it to a name at the top level of a module and give "module:name"'
        )
    if module == "__main__":
        script = sys.modules[module]
        module = getattr(script, "__file__", None) or ""
        if not module or is_running_unguarded(script):  # a notebook, or what would run once more
            module = copied(name.partition(".")[0])
    return (f"{module}:{name}",)


def _found(module: str, name: str) -> object:
    """What has that name in a module that has been imported; None if nothing has."""
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _is(one: object, other: object) -> bool:
    """A class's own method is another object each time that it is asked for."""
    return one is other or (
        getattr(one, "__self__", None) is getattr(other, "__self__", one)
        and getattr(one, "__func__", None) is getattr(other, "__func__", other)
    )
