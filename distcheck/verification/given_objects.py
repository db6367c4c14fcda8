"""Finds or creates names by which ranks can import strategies that are passed as objects.

Ranks import the code that they judge. A notebook is not a module, and a script that calls
`distcheck.verify` outside `if __name__ == "__main__":` would call it again in every rank. So a
definition there is copied from its source into a file, together with the names that it uses:
imports, constants, and other definitions of `__main__`. Values of other kinds cannot be written to
a file, and raise an error.
"""

import __future__

import ast
import functools
import inspect
import linecache
import math
import os
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

import xxhash

from distcheck import private
from distcheck.errors import CannotRunError, UsageError
from distcheck.store.run_folder import private_folder

_HEADER = (
    '"""Copied by distcheck: {name} of a notebook or a running script, and the names that '
    'it uses."""'
)
_PLAIN = (int, str, bytes, bool, type(None))


def copy_of_definition(name: str) -> str:
    """Copy the definition of `name` in `__main__` to a file, and return its path. Raises UsageError
    if the source is unknown or its values cannot be copied, CannotRunError if writing fails.
    """
    text = _Copy(vars(sys.modules["__main__"]), name).text()
    digest = xxhash.xxh3_64_hexdigest(text.encode())[:8]
    path = private_folder("cells") / f"{name}-{digest}.py"
    try:
        private.write(path, text)  # even over an edited one
    except OSError as error:
        raise CannotRunError(
            f"{path} cannot be written: {error.strerror}; work in a writable folder"
        ) from error
    return str(path)


def is_running_unguarded(script: ModuleType) -> bool:
    """Return True if a script is running code that is not inside an `if` that tests `__name__`."""
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_globals is vars(script) and frame.f_code.co_name == "<module>"
    ):
        frame = frame.f_back
    if frame is None:
        return False
    line, tree = frame.f_lineno, _tree(frame.f_code.co_filename, vars(script))
    here = [n for n in tree.body if n.lineno <= line <= (n.end_lineno or n.lineno)]
    guards = [n for n in here if isinstance(n, ast.If) and "__name__" in ast.dump(n.test)]
    return bool(here) and not guards


class _Copy:
    """Assembles a copy; dependencies come before the code that needs them at import."""

    def __init__(self, names: dict[str, Any], name: str) -> None:
        self._names, self._root = names, name
        self._imports: dict[str, None] = {}
        self._definitions: dict[str, str] = {}
        self._seen: set[str] = set()
        self._add(name)

    def text(self) -> str:
        imports = sorted(self._imports, key=lambda line: "__future__" not in line)
        top = "\n".join([_HEADER.format(name=self._root), "", *imports])
        return "\n\n\n".join([top, *self._definitions.values()]) + "\n"

    def _add(self, name: str) -> None:
        if name in self._seen or name not in self._names or name.startswith("__"):
            return  # a builtin, or missing in the notebook as well
        self._seen.add(name)
        value = self._names[name]
        if isinstance(value, ModuleType):
            self._imports[_import(value.__name__, name)] = None
        elif getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            self._define(name, value)
        elif _is_plain(value):
            self._definitions[name] = f"{name} = {value!r}"
        elif line := _importing(name, value):
            self._imports[line] = None
        else:
            kind = type(value).__name__
            raise UsageError(
                f"{self._root} uses {name}, a {kind}, which ranks cannot import; create it "
                "inside the function, or put the code into a file and pass "
                f'"path/to/file.py:{self._root}"'
            )

    def _define(self, name: str, value: Any) -> None:
        found = next(
            (place for code in _codes_of(value) for place in [self._place(value, code)] if place),
            None,
        )
        if found is None or value.__qualname__ != name:
            raise UsageError(
                f"the source of {name} is not available, and ranks have to import it; put it "
                f'into a file and pass "path/to/file.py:{self._root}"'
            )
        node, source, future = found
        if future:
            self._imports["from __future__ import annotations"] = None
        for used in sorted(_globals(symtable.symtable(source, name, "exec"))):
            self._add(used)
        for line in _submodules(node, self._names):
            self._imports[line] = None
        self._definitions[name] = source

    def _place(self, value: Any, code: CodeType) -> "tuple[ast.AST, str, bool] | None":
        """Return the definition around a line, its source, and if annotations are strings."""
        lines = linecache.getlines(code.co_filename, self._names)
        for node in ast.walk(_tree(code.co_filename, self._names)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                last = node.end_lineno or node.lineno
                if first <= code.co_firstlineno <= last:
                    source = textwrap.dedent("".join(lines[first - 1 : last])).rstrip()
                    future = bool(code.co_flags & __future__.annotations.compiler_flag)
                    return node, source, future
        return None


def _tree(filename: str, names: dict[str, Any]) -> ast.Module:
    """Return the tree of a cell or file, as it was run; empty if unknown."""
    try:
        return ast.parse("".join(linecache.getlines(filename, names)))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _codes_of(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of a class's own methods."""
    members = vars(value).values() if isinstance(value, type) else (value,)
    for member in members:
        member = member.fget if isinstance(member, property) else member
        function: Any = getattr(member, "__func__", member)
        code = getattr(inspect.unwrap(function), "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _globals(table: symtable.SymbolTable, *, top: bool = True) -> set[str]:
    """Return the global names that the code uses, when it is defined and when it runs."""
    symbols = [one for one in table.get_symbols() if one.is_referenced()]
    own = {one.get_name() for one in symbols if top or one.is_global()}
    return own.union(*(_globals(inner, top=False) for inner in table.get_children()))


def _submodules(node: ast.AST, names: dict[str, Any]) -> Iterator[str]:
    """Yield imports of `a.b` for code with `a.b.c`, which another cell may have imported."""
    for one in ast.walk(node):
        parts: list[str] = []
        while isinstance(one, ast.Attribute):
            parts, one = [one.attr, *parts], one.value
        value = names.get(one.id) if isinstance(one, ast.Name) else None
        for part in parts if isinstance(value, ModuleType) else ():
            value = getattr(value, part, None)
            if not isinstance(value, ModuleType):
                break
            yield f"import {value.__name__}"


def _import(module: str, name: str) -> str:
    return f"import {module}" if module == name else f"import {module} as {name}"


def _is_plain(value: Any) -> bool:
    """Return True if `repr` of a value evaluates to the same value."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _PLAIN or (type(value) is float and math.isfinite(value))


def _importing(name: str, value: Any) -> str:
    """Return the import that yields this very object from a loaded module, or ""."""
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "layout"):
        return f"import torch\n{name} = {value!r}"
    loaded = {
        key: vars(module)
        for key, module in sys.modules.items()
        if key != "__main__" and isinstance(module, ModuleType)
    }
    home, own = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
    if loaded.get(home, {}).get(own) is value:
        return f"from {home} import {own}" + (f" as {name}" if own != name else "")
    homes = [key for key, module in loaded.items() if module.get(name) is value]
    return f"from {min(homes, key=len)} import {name}" if homes else ""


def importable_names(
    strategy: str | os.PathLike[str] | Callable[..., Any] | Sequence[str],
) -> tuple[str, ...]:
    """Return the name of an object in a tuple; return names unchanged.

    Raises UsageError for an object that ranks would not find under its name: they import its module
    again, and would judge a different object. For a notebook, the source of the object is copied.
    """
    if isinstance(strategy, str | os.PathLike):
        return (os.fspath(strategy),)
    if isinstance(strategy, Iterable) and not callable(strategy):
        names = list(strategy)
        if names and all(isinstance(name, str | os.PathLike) for name in names):
            return tuple(os.fspath(name) for name in names)
    if not callable(strategy):
        raise UsageError(
            f"strategy {strategy!r} is of an unsupported type; pass a name, "
            '"path/to/file.py:object", a function or class, or several names'
        )
    module, name = getattr(strategy, "__module__", ""), getattr(strategy, "__qualname__", "")
    if not module or not name or "<" in name:
        raise UsageError(
            f"strategy {strategy!r} has no importable name; define it at the top "
            'level of a module, or pass "path/to/file.py:object"'
        )
    if not _is_same(strategy, _found(module, name)):
        raise UsageError(
            f"strategy {strategy!r} is not the object that ranks import as {name} in {module}; "
            'assign it to a name at the top level of a module and pass "module:name"'
        )
    if module == "__main__":
        script = sys.modules[module]
        module = getattr(script, "__file__", None) or ""
        if not module or is_running_unguarded(script):  # a notebook, or code that would run again
            module = copy_of_definition(name.partition(".")[0])
    return (f"{module}:{name}",)


def _found(module: str, name: str) -> object:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _is_same(one: object, other: object) -> bool:
    """Return True for the same object, or two accesses of one bound method."""
    return one is other or (
        getattr(one, "__self__", None) is getattr(other, "__self__", one)
        and getattr(one, "__func__", None) is getattr(other, "__func__", other)
    )
