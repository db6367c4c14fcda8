"""How large the house is, and how tangled: figures to compare before and after a change of shape.

python bench/house.py [FOLDER ...]     each folder holds a checkout; this one by default
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MOST_PARAMETERS = 8
_SMALL = 50  # lines
# Names that say nothing of what they hold.
_VAGUE = ("told", "said", "own", "asked", "given", "found", "beside")
# Packages whose private names are doors that their next release may close, each with the module
# that may use them.
_LIBRARIES = {
    "torch": "distcheck.machine.compat",
    "pytest": "distcheck.testing.pytest_compat",
    "_pytest": "distcheck.testing.pytest_compat",
    "hypothesis": "distcheck.testing.hypothesis_compat",
    "click": "",
    "msgspec": "",
}
_PRIVATE = re.compile(r"_[a-zA-Z]\w*")
_BY_NAME = ("getattr", "hasattr", "setattr")
# Of nodes of torch's graphs, and of Python's named tuples.
_DOCUMENTED = re.compile(r"_saved_\w+|_replace|_make|_asdict|_fields")


def modules(root: Path) -> dict[str, ast.Module]:
    """The parsed modules of the package, by dotted name."""
    found = {}
    for path in sorted((root / "distcheck").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def imports(trees: dict[str, ast.Module], *, all_of_them: bool) -> dict[str, set[str]]:
    """Which module imports which; for types alone and inside functions only with `all_of_them`.
    The package itself, whose public names are resolved on first use, is left out.
    """
    return {
        name: set(_targets(tree, trees, all_of_them=all_of_them)) - {name, "distcheck"}
        for name, tree in trees.items()
        if name != "distcheck"
    }


def _targets(tree: ast.Module, trees: dict[str, ast.Module], *, all_of_them: bool) -> Iterator[str]:
    nodes = ast.walk(tree) if all_of_them else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in trees:
            assert node.module is not None
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (one if one in trees else node.module for one in whole)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in trees)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other: strongly connected, by Tarjan (1972)."""
    found: list[list[str]] = []
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == name:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def figures(root: Path) -> Iterator[tuple[str, int | str]]:
    """What there is to compare."""
    trees = modules(root)
    texts = [path.read_text() for path in (root / "distcheck").rglob("*.py")]
    lengths = [len(text.splitlines()) for text in texts]
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = Counter(n.name for n in nodes if isinstance(n, ast.ClassDef))
    yield "lines", sum(lengths)
    yield "modules", len(trees)
    yield f"modules under {_SMALL} lines", sum(length < _SMALL for length in lengths)
    yield f"functions over {_MOST_PARAMETERS} parameters", len([*with_many_parameters(trees)])
    plain = circles(imports(trees, all_of_them=False))
    every = circles(imports(trees, all_of_them=True))
    yield "circles", len(plain)
    yield "circles with hidden imports", len(every)
    yield "modules in them", sum(map(len, every))
    yield "class names used twice", sum(count > 1 for count in classes.values())
    bound = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    yield "vague names bound", sum(bound[name] for name in _VAGUE)
    yield "private names of libraries", sum(map(len, doors(trees).values()))


def with_many_parameters(trees: dict[str, ast.Module]) -> Iterator[str]:
    """The functions with more parameters than a reader holds in mind, each with its module."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _has_many(node):
                yield f"{module}.{node.name}"


def _has_many(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")]) > _MOST_PARAMETERS


def doors(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The private names of libraries that each module uses, but for the module that is there for a
    library: those of its modules, and of its objects those that no module here defines.
    """
    defined = {name for tree in trees.values() for name in _defined(tree)}
    found = {}
    for module, tree in trees.items():
        if module in _LIBRARIES.values():
            continue
        if used := sorted(_private(tree, defined)):
            found[module] = used
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def _private(tree: ast.Module, defined: set[str]) -> Iterator[str]:
    libraries = {"c10d", *_LIBRARIES}  # names that stand for a library, or something of it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = f"{of}.{alias.name}".lstrip(".")
                if whole.partition(".")[0] in _LIBRARIES:
                    libraries.add(alias.asname or alias.name.partition(".")[0])
                    if any(map(_PRIVATE.fullmatch, whole.split("."))):
                        yield whole
    for node in ast.walk(tree):
        name, root = "", None
        if isinstance(node, ast.Attribute):
            name, root = node.attr, _root(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _BY_NAME:
            name, root = getattr(node.args[1], "value", ""), _root(node.args[0])
        if not isinstance(name, str) or not _PRIVATE.fullmatch(name) or _DOCUMENTED.match(name):
            continue
        of_python = root in sys.stdlib_module_names or root in ("self", "cls", "super")
        if root in libraries or not (of_python or name in defined):
            yield f"{root}: {name}"


def _root(node: ast.expr) -> str | None:
    """The name that an expression begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def main() -> None:
    """Prints a column for each folder."""
    roots = [Path(word) for word in sys.argv[1:]] or [ROOT]
    columns = [dict(figures(root)) for root in roots]
    for name in columns[0]:
        print(f"{name:32}" + "".join(f"{column[name]:>12,}" for column in columns))
    for group in circles(imports(modules(roots[-1]), all_of_them=True)):
        print(f"circle: {', '.join(group)}")


if __name__ == "__main__":
    main()
