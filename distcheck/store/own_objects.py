"""Where an object that a case names is defined, by reading source files; nothing is imported.

A file of this checkout imports other modules, so `sync.py:os.system` names code that is not of this
checkout. An object counts as defined in a file if a top-level `def`, `class` or assignment there
makes its first name, or if the file imports that name from a file for which the same holds.
"""

import ast
from collections.abc import Callable
from pathlib import Path

from distcheck.plan import provenance

_MOST_IMPORTS = 8  # from one file to the next
_SPECIAL = "__"


def is_defined(file: Path, attribute: str, is_trusted: Callable[[Path], bool]) -> bool:
    """Whether `attribute` (a dotted name) is defined in `file`, or in a file that `is_trusted` and
    from which `file` imports it.
    """
    name, *rest = attribute.split(".")
    if any(part.startswith(_SPECIAL) for part in (name, *rest)):
        return False
    for _ in range(_MOST_IMPORTS):
        try:
            body = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        kind, found = _made_by(body, name)
        if kind == "definition":
            return True
        if kind != "import":
            return False
        module, level, name = found
        source = _file_of(file, module, level)
        if source is None or not is_trusted(source):
            return False
        file = source
    return False


def _made_by(body: list[ast.stmt], name: str) -> tuple[str, tuple[str, int, str]]:
    """What makes a name, the last statement counting: "definition", "import" with the module, its
    level and the name there, or "".
    """
    kind, found = "", ("", 0, "")
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                kind = "definition"
        elif isinstance(node, ast.Import):
            if any((one.asname or one.name.partition(".")[0]) == name for one in node.names):
                kind = "module"
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                if (one.asname or one.name) == name:
                    kind, found = "import", (node.module or "", node.level, one.name)
        elif name in _assigned(node):
            kind = "definition" if _is_made_here(node) else "module"
    return kind, found


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_made_here(node: ast.stmt) -> bool:
    """Whether an assignment makes a new object, unlike `run = os.system`."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return not isinstance(value, ast.Name | ast.Attribute | None)


def _file_of(file: Path, module: str, level: int) -> Path | None:
    if level == 0:
        beside = file.parent.joinpath(*module.split("."))
        return _source(beside) or provenance.file_of(module)
    folder = file.parents[level - 1] if level <= len(file.parents) else None
    return None if folder is None else _source(folder.joinpath(*filter(None, module.split("."))))


def _source(base: Path) -> Path | None:
    places = (base.with_name(f"{base.name}.py"), base / "__init__.py")
    return next((place for place in places if place.is_file()), None)
