"""What code sets in modules and classes that all ranks share: each rank has its own value there.

Code under test may set `torch.distributed.all_reduce`, or `nn.Linear.forward`, or an attribute of
its own on a module of torch. Its files say so, and are read before they run: assignments to
attributes, `setattr`, `mock.patch`. What is set in another way (an object that a variable holds, a
name that is computed and not there yet) is not found.

Functions of an installed package that code under test imports may assign its global variables, as
those do that keep groups of ranks. Their bytecode says which.
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
    """A name in a module or class, and what it was before any rank had set it."""

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
    """The places that code of this process sets. `is_own(module)` is whether a module is of the
    code under test, and so each rank's own.
    """

    def __init__(self, is_own: Callable[[ModuleType], bool], libraries: Sequence[str]) -> None:
        self._is_own, self._libraries = is_own, tuple(libraries)
        self._files: set[str] = set()  # those that have been looked at
        self._shared: set[str] = set()  # of these, those of modules that all ranks share
        self._known: set[tuple[int, str]] = set()
        self._places: list[PatchedName] = []
        for module, name in _watching.of_packages:
            self._add(module, name)
        _watch_imports()
        _watching.patches = self

    def take(self) -> list[Any]:
        return [place.value() for place in self._places]

    def give(self, own: Sequence[Any]) -> None:
        """Sets those of the rank that runs now."""
        for number, place in enumerate(self._places):
            place.put(own[number] if number < len(own) else place.original)

    def end(self) -> None:
        """Puts everything back, after the last rank."""
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
        if not file.startswith(self._libraries) and self._of_code_under_test():
            loader: Any = module.__loader__
            with suppress(ImportError, OSError, SyntaxError):
                for name in _assigned(loader.get_code(module.__name__)):
                    _watching.of_packages.append((module, name))
                    self._add(module, name)

    def _add(self, owner: Any, name: str) -> None:
        """Notes a place, if all ranks share it and it is not a property."""
        module = owner if isinstance(owner, ModuleType) else sys.modules.get(owner.__module__)
        if module is None or self._is_own(module) or (id(owner), name) in self._known:
            return
        found = vars(owner).get(name, _MISSING)
        if found is _MISSING and isinstance(owner, ModuleType) and hasattr(type(owner), name):
            return
        self._known.add((id(owner), name))
        self._places.append(PatchedName(owner, name, found))

    def _of_code_under_test(self) -> bool:
        """Whether code under test imports what is imported now, and not a library."""
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
    """Whose modules are watched; and what packages assign that a world before this one imported in
    this process.
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
    """The modules and classes that a file sets something in, and the names that it sets."""
    nodes = list(ast.walk(tree))
    aliases = dict(_imported(nodes))
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            words = [*_words(node.value, aliases), node.attr]
        elif isinstance(node, ast.Call):
            words = _named_in_call(node, aliases)
        else:
            continue
        owner = _found(words[:-1])
        if isinstance(owner, ModuleType | type):
            names = [words[-1]] if words[-1] else [n for n in vars(owner) if n[:2] != "__"]
            yield from ((owner, name) for name in names)


def _imported(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """What the names stand for that a file imports."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                yield (one.asname, one.name) if one.asname else 2 * (one.name.partition(".")[0],)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def _words(node: ast.AST, aliases: Mapping[str, str]) -> list[str]:
    """The full name of what an expression like `a.b.c` stands for; nothing for any other."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return []
    return [*aliases[node.id].split("."), *words]


def _named_in_call(node: ast.Call, aliases: Mapping[str, str]) -> list[str]:
    """The full name that `setattr(a.b, "c", ...)` or `patch("a.b.c", ...)` sets. Its last word is
    empty for a name that is computed, which may be any that is there.
    """
    function, given = node.func, node.args
    name = getattr(function, "attr", getattr(function, "id", ""))
    texts = [one.value if isinstance(one, ast.Constant) else None for one in given[:2]]
    if name in _BY_NAME and len(texts) == 2 and texts[1] is None:
        return [*_words(given[0], aliases), ""]
    if name in _BY_NAME and len(texts) == 2 and isinstance(texts[1], str):
        return [*_words(given[0], aliases), texts[1]]
    if name in ("patch", "setattr") and texts and isinstance(texts[0], str):
        return texts[0].split(".")
    return [""]


def _found(words: Sequence[str]) -> Any:
    """The module or class of a full name; None where there is none yet."""
    for count in range(len(words), 0, -1):
        found: Any = sys.modules.get(".".join(words[:count]))
        if found is not None:
            for word in words[count:]:
                found = vars(found).get(word) if isinstance(found, ModuleType | type) else None
            return found
    return None


def _assigned(code: CodeType | None) -> Iterator[str]:
    """The global variables that functions of a module assign."""
    for inner in () if code is None else code.co_consts:
        if isinstance(inner, CodeType):
            if _STORES in inner.co_code[::2]:
                found = dis.get_instructions(inner)
                yield from (one.argval for one in found if one.opcode == _STORES)
            yield from _assigned(inner)
