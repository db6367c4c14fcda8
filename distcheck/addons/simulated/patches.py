"""Gives each rank its own value of attributes that code sets in shared modules and classes.

Code under test may set `torch.distributed.all_reduce`, `nn.Linear.forward`, or a new attribute of a
torch module. Before its files run, they are parsed for assignments to attributes, `setattr` and
`mock.patch`. Attributes that are set in another way are not found: through an object in a variable,
or by a computed name that does not exist yet.

The code may also import an installed package whose functions assign global variables of the
package, such as those that hold process groups. The bytecode of these functions is searched for
such assignments.
"""

import ast
import dis
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_MISSING: Any = object()
_BY_NAME = ("setattr", "delattr", "object")  # mock.patch.object; monkeypatch has the first two
_STORES = dis.opmap["STORE_GLOBAL"]


@dataclass(frozen=True)
class PatchedName:
    """An attribute of a module or class, and its value before any rank set it."""

    owner: Any
    name: str
    original: Any

    def value(self) -> Any:
        return vars(self.owner).get(self.name, _MISSING)

    def put(self, value: Any) -> None:
        if value is self.value():
            return
        if value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Patches:
    """The attributes that the code in this process sets. `is_own(module)` returns True if a module
    belongs to the code under test; such a module exists once per rank.
    """

    def __init__(self, is_own: Callable[[ModuleType], bool], libraries: Sequence[str]) -> None:
        self._is_own, self._libraries = is_own, tuple(libraries)
        self._files: set[str] = set()  # files that have been examined
        self._shared: set[str] = set()  # those of them whose modules all ranks share
        self._known: set[tuple[int, str]] = set()
        self._places: list[PatchedName] = []
        for module, name in _watching.of_packages:
            self._add(module, name)
        _watch_imports()
        _watching.patches = self

    def take(self) -> list[Any]:
        return [place.value() for place in self._places]

    def give(self, own: Sequence[Any]) -> None:
        """Set the values of the rank that runs next."""
        for number, place in enumerate(self._places):
            place.put(own[number] if number < len(own) else place.original)

    def end(self) -> None:
        """Restore the original values after the last rank."""
        self.give([])
        _watching.patches = None

    def before(self, module: ModuleType) -> None:
        file = module.__file__
        if file is None or file in self._files or not self._is_own(module):
            return
        self._files.add(file)
        with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            for owner, name in _set_in(ast.parse(Path(file).read_bytes())):
                self._add(owner, name)

    def after(self, module: ModuleType) -> None:
        file = module.__file__
        if file is None or file in self._files or self._is_own(module):
            return
        self._files.add(file)
        self._shared.add(file)
        if not file.startswith(self._libraries) and self._imports_for_code_under_test():
            loader: Any = module.__loader__
            with suppress(ImportError, OSError, SyntaxError):
                for name in _assigned_globals(loader.get_code(module.__name__)):
                    _watching.of_packages.append((module, name))
                    self._add(module, name)

    def _add(self, owner: Any, name: str) -> None:
        """Add an attribute, unless it is a property or its owner exists once per rank."""
        module = owner if isinstance(owner, ModuleType) else sys.modules.get(owner.__module__)
        if module is None or self._is_own(module) or (id(owner), name) in self._known:
            return
        found = vars(owner).get(name, _MISSING)
        if found is _MISSING and isinstance(owner, ModuleType) and hasattr(type(owner), name):
            return
        self._known.add((id(owner), name))
        self._places.append(PatchedName(owner, name, found))

    def _imports_for_code_under_test(self) -> bool:
        frame: Any = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self._libraries) and file != __file__:
                return False
            if file in self._files and file not in self._shared:
                return True
            frame = frame.f_back
        return False


class _Watching:
    """The patches of the running world, and the assignments found in packages that earlier worlds
    of this process have imported.
    """

    def __init__(self) -> None:
        self.patches: Patches | None = None
        self.of_packages: list[tuple[ModuleType, str]] = []


_watching = _Watching()


@cache
def _watch_imports() -> None:
    loaders: Any = importlib._bootstrap_external._LoaderBasics  # type: ignore[attr-defined]
    execute = loaders.exec_module

    def exec_module(self: Any, module: ModuleType) -> None:
        patches = _watching.patches
        if patches is not None:
            patches.before(module)
        execute(self, module)
        if patches is not None:
            patches.after(module)

    loaders.exec_module = exec_module


def _set_in(tree: ast.AST) -> Iterator[tuple[Any, str]]:
    """Yield the attributes that a file sets: the module or class, and the attribute's name."""
    nodes = list(ast.walk(tree))
    aliases = dict(_imported_names(nodes))
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            words = [*_dotted_name(node.value, aliases), node.attr]
        elif isinstance(node, ast.Call):
            words = _named_in_call(node, aliases)
        else:
            continue
        owner = _find_object(words[:-1])
        if isinstance(owner, ModuleType | type):
            names = [words[-1]] if words[-1] else [n for n in vars(owner) if n[:2] != "__"]
            yield from ((owner, name) for name in names)


def _imported_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                yield (one.asname, one.name) if one.asname else 2 * (one.name.partition(".")[0],)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def _dotted_name(node: ast.AST, aliases: Mapping[str, str]) -> list[str]:
    """Return the parts of the fully qualified name of an expression such as `a.b.c`; empty for any
    other.
    """
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return []
    return [*aliases[node.id].split("."), *words]


def _named_in_call(node: ast.Call, aliases: Mapping[str, str]) -> list[str]:
    """Return the parts of the fully qualified name that `setattr(a.b, "c", ...)` or `patch("a.b.c",
    ...)` sets. For a computed name, which may be any existing attribute, the last part is empty.
    """
    function, given = node.func, node.args
    name = getattr(function, "attr", getattr(function, "id", ""))
    texts = [one.value if isinstance(one, ast.Constant) else None for one in given[:2]]
    if name in _BY_NAME and len(texts) == 2 and texts[1] is None:
        return [*_dotted_name(given[0], aliases), ""]
    if name in _BY_NAME and len(texts) == 2 and isinstance(texts[1], str):
        return [*_dotted_name(given[0], aliases), texts[1]]
    if name in ("patch", "setattr") and texts and isinstance(texts[0], str):
        return texts[0].split(".")
    return [""]


def _find_object(words: Sequence[str]) -> Any:
    """Return the module or class with a fully qualified name; None if it does not exist yet."""
    for count in range(len(words), 0, -1):
        found: Any = sys.modules.get(".".join(words[:count]))
        if found is not None:
            for word in words[count:]:
                found = vars(found).get(word) if isinstance(found, ModuleType | type) else None
            return found
    return None


def _assigned_globals(code: CodeType | None) -> Iterator[str]:
    for inner in () if code is None else code.co_consts:
        if isinstance(inner, CodeType):
            if _STORES in inner.co_code[::2]:
                found = dis.get_instructions(inner)
                yield from (one.argval for one in found if one.opcode == _STORES)
            yield from _assigned_globals(inner)
