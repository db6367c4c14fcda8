"""Locates the definition of an object that a case names, by reading source files; nothing is
imported.

A file of this checkout imports other modules, so `sync.py:os.system` names code outside this
checkout. An object is defined in a file if a top-level `def` or `class` there has its name (also
below `if` or `try`), if it is created there by such a class or function, or if the file imports its
name from a file that defines it in this sense. For a dotted name, `Sync.reduce`, the rest must be a
`def` in that class's own body: `HERE.unlink` names a library method, whatever `HERE` is.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distcheck.plan import provenance
from distcheck.records.decoding import parse_source

_MOST_IMPORTS = 8  # from one file or name to the next
_SPECIAL = "__"


def is_defined(
    file: Path, attribute: str, is_trusted: Callable[[Path], bool], most: int = _MOST_IMPORTS
) -> bool:
    """Return True if `attribute` (a dotted name) is defined in `file`, or in a file that
    `is_trusted` and from which `file` imports it, through at most `most` statements.
    """
    name, *rest = attribute.split(".")
    if any(part.startswith(_SPECIAL) for part in (name, *rest)):
        return False
    for left in range(most, 0, -1):
        try:
            body = parse_source(file).body
        except (OSError, SyntaxError):
            return False
        found = _made_by(body, name)
        if isinstance(found, ast.ImportFrom):
            source = _file_of(file, found.module or "", found.level)
            if source is None or not is_trusted(source):
                return False
            file, name = source, _name_there(found, name)
            continue
        if isinstance(found, ast.Assign | ast.AnnAssign):
            maker = _maker(found.value)
            return bool(maker) and not rest and is_defined(file, maker, is_trusted, left - 1)
        return _is_within(found, rest)
    return False


def _made_by(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """Return the last statement that binds a name; None if there is none."""
    found = None
    for node in _top_level(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            makes = node.name == name
        elif isinstance(node, ast.Import):
            makes = any((one.asname or one.name.partition(".")[0]) == name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            makes = any((one.asname or one.name) == name for one in node.names)
        else:
            makes = name in _assigned(node)
        found = node if makes else found
    return found


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those below `if`, `try` and `with`."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _top_level(getattr(node, part, []))


def _name_there(node: ast.ImportFrom, name: str) -> str:
    """Return the original name of an imported name in its module."""
    return next(one.name for one in node.names if (one.asname or one.name) == name)


def _is_within(node: ast.stmt | None, rest: Sequence[str]) -> bool:
    """Return True if a definition contains the rest of a dotted name in its own body."""
    for part in rest:
        if not isinstance(node, ast.ClassDef):
            return False
        inner = [n for n in node.body if getattr(n, "name", None) == part]
        node = inner[-1] if inner else None
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _maker(value: ast.expr | None) -> str:
    """Return the name whose call creates a value: `Sync` in `sync = Sync()`; else empty."""
    called = value.func if isinstance(value, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else ""


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _file_of(file: Path, module: str, level: int) -> Path | None:
    if level == 0:
        beside = file.parent.joinpath(*module.split("."))
        return _source(beside) or provenance.file_of(module)
    folder = file.parents[level - 1] if level <= len(file.parents) else None
    return None if folder is None else _source(folder.joinpath(*filter(None, module.split("."))))


def _source(base: Path) -> Path | None:
    places = (base.with_name(f"{base.name}.py"), base / "__init__.py")
    return next((place for place in places if place.is_file()), None)
