"""Handles files that train when they are imported: only their definitions are run.

Scripts often train at the top level: they initialize the process group, read a command line, and
loop. Their functions can still be verified.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from distcheck.records.decoding import parse_source, read_source
from distcheck.training import sources_only

_TRAINS = {"backward", "spawn"}
_BEGINS = {"init_process_group", "parse_args"}  # possibly guarded, and then harmless
_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Names that an assignment may call: they only compute a value from literals.
_MAY_BE_CALLED = {
    "torch", "nn", "np", "math", "int", "float", "str", "bool", "tuple", "list", "dict", "set",
    "range", "len", "namedtuple", "dataclass", "partial", "TypeVar",
}  # fmt: skip
# With these, a module may define names that do not occur in its source.
_BINDS_ANY = {
    "*", "__getattr__", "globals", "locals", "vars", "setattr", "exec", "eval", "__dict__",
    "sys.modules",
}  # fmt: skip
ONLY_DEFINED = "__distcheck_only_defined__"  # in a module: the line of its training


def line_of_training(path: Path, *, begins: bool = False) -> int:
    """Return the top-level line at which a file trains or, with `begins`, initializes a process
    group or reads its command line; 0 if there is none.
    """
    names = _TRAINS | _BEGINS if begins else _TRAINS
    calls = (call for node in _top_level(path) or () for call in _calls_in(node))
    return min((call.lineno for call in calls if _name_of(call.func) in names), default=0)


def has_definitions(path: Path) -> bool:
    """Return True if a file defines a function or a class at its top level."""
    body = _top_level(path)
    return body is None or any(isinstance(node, _DEFINES[2:]) for node in body)


def levels_of_imports(path: Path) -> int:
    """Return the number of folders up that the imports of a file reach, by relative imports and by
    the name of a package that contains the file.
    """
    found, folders = [0], list(path.parent.parts)[::-1]
    for node in ast.walk(ast.Module(_top_level(path) or [], type_ignores=[])):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(node.level)
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        heads = {module.partition(".")[0] for module in modules} & {*folders}
        places = {head: folders.index(head) for head in heads}
        found += [at + 1 for head, at in places.items() if _is_own(head, path.parents[at])]
    return max(found)


def import_root(path: Path) -> Path:
    """Return the folder from which a file must be imported: the parent of its topmost package."""
    folder, levels = path.parent, levels_of_imports(path)
    while (levels > 0 or (folder / "__init__.py").is_file()) and folder != folder.parent:
        folder, levels = folder.parent, levels - 1
    return folder


def _is_own(package: str, folder: Path) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is None or str(folder) in (spec.submodule_search_locations or ())


def first_definition(path: Path) -> str:
    """Return the first public function or class of a file, as an example for messages."""
    return next(iter(public_definitions(path)), "my_sync")


def never_binds(path: Path, name: str) -> bool:
    """Return True if nothing in a file binds a name, and nothing can create it dynamically."""
    try:
        nodes = list(ast.walk(parse_source(path)))
    except (OSError, SyntaxError):
        return False
    return not any(name in _bound_by(node) or _BINDS_ANY & _bound_by(node) for node in nodes)


def public_definitions(path: Path) -> list[str]:
    """Return the public functions and classes of a file."""
    return [
        node.name
        for node in _top_level(path) or ()
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]


def _bound_by(node: ast.AST) -> set[str]:
    """Return the names that a node binds, and those of `_BINDS_ANY` that it uses."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Attribute):
        return {node.attr, f"{_root_of(node)}.{node.attr}"} & {"__dict__", "sys.modules"}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else {node.id} & _BINDS_ANY
    return {getattr(node, "name", None) or ""}  # of an exception handler or a match pattern


def _top_level(path: Path) -> list[ast.stmt] | None:
    """Return the top-level statements of a file; None if it cannot be parsed."""
    try:
        return parse_source(path).body
    except (OSError, SyntaxError):
        return None


def run_definitions(module: ModuleType, path: Path, before: Mapping[str, Any]) -> None:
    """Run the imports, definitions and plain assignments of a file in a new module. Names that
    depend on a skipped line stay undefined.
    """
    vars(module).update(before)
    for node in parse_source(sources_only.checked_bytes(str(path), read_source(path))).body:
        if not isinstance(node, _DEFINES) and not _is_plain(node):
            continue
        code = compile(ast.Module([node], type_ignores=[]), str(path), "exec")
        try:
            exec(code, vars(module))  # as an import would
        except Exception:
            if isinstance(node, _DEFINES):
                raise
    setattr(module, ONLY_DEFINED, line_of_training(path, begins=True))


def _calls_in(node: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls in a statement that run on import, outside functions and classes."""
    if isinstance(node, _DEFINES) or (
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    ):
        return
    waiting: list[ast.AST] = [node]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, _DEFINES):
            continue
        if isinstance(inner, ast.Call):
            yield inner
        waiting += ast.iter_child_nodes(inner)


def _is_plain(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    calls = [inner for inner in ast.walk(node.value) if isinstance(inner, ast.Call)]
    return all(_root_of(call.func) in _MAY_BE_CALLED for call in calls)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _root_of(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute):
        function = function.value
    return getattr(function, "id", "")
