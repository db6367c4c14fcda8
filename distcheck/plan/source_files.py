"""Finds the source files of a piece of code: its file, and imports from its project."""

import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

from distcheck.records.decoding import parse_source, read_source
from distcheck.training.loading import strategy_names
from distcheck.training.scripts import import_root
from distcheck.training.sources_only import is_installed as is_installed_file

NO_DIGEST = "none"
_OWN = "distcheck_strategies"
_LOADED = "distcheck"  # loaded in every process, before user code
_COMPILED = (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_EVERYTHING = "*"
HERE = "./"  # prefix of a path that is relative to the current folder
_DOTTED = re.compile(r"[^\s/\\\0]{1,200}")
_MOST_PAIRED = 16  # texts of one call
_CACHE = "__pycache__"  # not read: loading.py disables it for code that was handed over
_DIGITS = 32  # of SHA-256: 128 bits, enough against a second preimage


class SourceFile(NamedTuple):
    """Path and content of a file that belongs to a piece of code."""

    path: Path
    data: bytes


def python_sources_of(path: Path) -> dict[str, SourceFile]:
    """Return the Python sources among the `files_of` a path. Raises OSError."""
    return {
        name: file for name, file in project_files_of(path).items() if file.path.suffix == ".py"
    }


def project_files_of(path: Path, others: Iterable[Path] = ()) -> dict[str, SourceFile]:
    """Return a file, and all files of its project that Python imports for it.

    These are modules of its folder, of its package, of the parent packages (with their `__init__`)
    and of the current folder, both sources and compiled modules. The file comes first. Nothing is
    imported, so a module name that is computed at run time is unknown. An installed file is
    returned without others: its folder is the whole library.

    Keys are paths relative to the file's `import_root`, or to the current folder, with the prefix
    "./". `others` are files that the same process loads. Their folders precede the current folder
    and can shadow modules, including the file itself. Keys of modules in these folders are absolute
    paths. Raises OSError.
    """
    content = read_source(path)
    if is_installed_file(path):
        return {path.name: SourceFile(path, content)}
    own, here = path.resolve(), Path.cwd()
    root = import_root(own)
    found: dict[str, SourceFile] = {}
    seen: set[Path] = set()
    whole: set[Path] = set()
    looked: set[tuple[Path, str, bool]] = set()
    is_installed, tops_in = functools.cache(_is_installed), functools.cache(_tops_in)
    far = [place for one in map(Path.resolve, others) for place in (one.parent, import_root(one))]
    ahead = [own, *_initializers(own, root)]
    inside = own.relative_to(here) if own.is_relative_to(here) else Path(own.name)
    dotted = ".".join(inside.with_suffix("").parts)
    ahead += [file for place in far for file in _files_of_module(place, dotted, own, None)]
    while ahead:
        if (file := ahead.pop(0)) in seen:
            continue
        seen.add(file)
        name = str(file)
        if file.is_relative_to(root):
            name = file.relative_to(root).as_posix()
        elif file.is_relative_to(here):
            name = f"{HERE}{file.relative_to(here).as_posix()}"
        elif not any(map(file.is_relative_to, far)):
            continue  # a relative import out of the package, which Python refuses
        one = SourceFile(path, content) if file == own else SourceFile(file, read_source(file))
        found[name] = one
        for level, module, is_whole in _find_imports(one.data) if file.suffix == ".py" else ():
            top = module.partition(".")[0]
            places = [*file.parents[level - 1 : level]] if level else [own.parent, root]
            places += [] if level or is_whole else [file.parent]  # a level may be an argument
            places += [] if level else far if is_installed(top) else [*far, here]
            for place in dict.fromkeys(places):
                if top in tops_in(place) and (place, module, is_whole) not in looked:
                    looked.add((place, module, is_whole))
                    ahead += _files_of_module(place, module, own, whole if is_whole else None)
    return found


def paths_in_common_folder(files: Mapping[str, SourceFile]) -> Iterator[tuple[str, SourceFile]]:
    """Yield files with their paths in one common folder. If a name occurs twice, the file in the
    current folder comes last: Python finds the first.
    """
    for name, file in sorted(files.items(), key=lambda one: one[0].startswith(HERE)):
        yield name.removeprefix(HERE), file


def _initializers(path: Path, root: Path) -> list[Path]:
    """Return the `__init__` files of the packages that contain a file, which run before it."""
    above = [folder for folder in path.parents if folder.is_relative_to(root)]
    return [file for folder in above for file in _files_with_suffixes(folder / "__init__")]


def _files_of_module(place: Path, module: str, own: Path, whole: set[Path] | None) -> list[Path]:
    """Return the files that `import module` may run if it is found in a folder.

    For a package that does not contain `own`, and for one from which everything is imported, these
    are all its files, if there is a set `whole` of such packages.
    """
    found: list[Path] = []
    for part in filter(None, module.split(".")):
        if part == _EVERYTHING:
            return found + (_all_code(place, whole) if place.is_dir() else [])
        package = _files_with_suffixes(place / part / "__init__")
        if package and whole is not None and not own.is_relative_to(place / part):
            return found + _all_code(place / part, whole)
        found += package
        if not package and (modules := _files_with_suffixes(place / part)):
            return found + modules
        place /= part
    return found + _files_with_suffixes(place / "__init__")


def _tops_in(place: Path) -> set[str]:
    """Return the possible first parts of names of modules in a folder."""
    entries = os.listdir(place) if place.is_dir() else ()
    return {"", _EVERYTHING, *(entry.partition(".")[0] for entry in entries)}


def _files_with_suffixes(path: Path) -> list[Path]:
    files = (path.with_name(path.name + end) for end in (".py", *_COMPILED))
    return [file for file in files if file.is_file()]


def _all_code(package: Path, whole: set[Path] | None) -> list[Path]:
    """Return all modules at and below a folder, links included, if not listed before."""
    if whole is None or package in whole:
        return []
    whole.add(package)
    found: list[Path] = []
    ahead, seen = [package], {package.resolve()}
    while ahead:
        for one in sorted(ahead.pop().iterdir()):
            if one.is_dir():
                ahead += [] if one.resolve() in seen else [one]
                seen.add(one.resolve())
            elif one.name.endswith(".py" if one.parent.name == _CACHE else (".py", *_COMPILED)):
                found += [one] if one.is_file() else []
    return found


def _is_installed(top: str) -> bool:
    """Return True if a module is found before the current folder, which is searched last."""
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return False
    origin = None if spec is None else spec.origin
    return origin is not None and not Path(origin).is_relative_to(Path.cwd())


def digest_of_sources(files: Mapping[str, bytes]) -> str:
    """Return one digest of the contents and names of files; "none" if there are none."""
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    return combined_digest(digests) if files else NO_DIGEST


def combined_digest(digests: Mapping[str, bytes]) -> str:
    """Return one digest for the digests of several files by name."""
    lines = (f"{digest.hex()} {name}" for name, digest in sorted(digests.items()))
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:_DIGITS]


def matches_in_sources(pattern: str, spec: str) -> bool:
    """Return True if a regular expression matches in the source of a strategy (name, file or
    module), or of a project module that the strategy imports. Nothing is imported.
    """
    path = _file_of(spec)
    if path is None:
        return False
    try:
        texts = [file.data for file in python_sources_of(path).values()]
    except OSError:
        return False
    return any(re.search(pattern.encode(), text) for text in texts)


def declared_promises(spec: str) -> dict[str, object]:
    """Return the constant arguments of a `@strategy(...)`. Nothing is imported."""
    path, point = _file_of(spec), strategy_names().get(spec)
    name = (spec if point is None else point.value).partition(":")[2]
    try:
        body = parse_source(path).body if path is not None and name else []
    except (OSError, SyntaxError):
        return {}
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [node for node in body if isinstance(node, kinds) and node.name == name]
    calls = [d for node in found for d in node.decorator_list if isinstance(d, ast.Call)]
    return {
        word.arg: word.value.value
        for call in calls
        for word in call.keywords
        if word.arg and isinstance(word.value, ast.Constant)
    }


def _file_of(spec: str) -> Path | None:
    """Return the source file of a strategy; None if finding it would need an import."""
    what, _, _ = spec.partition(":")
    if what.endswith(".py"):
        return Path(what)
    point = strategy_names().get(spec)
    package, *inside = (what if point is None else point.value.partition(":")[0]).split(".")
    if package == _OWN:  # importing it is safe, and locates it in a checkout
        importlib.import_module(package)
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    if not inside:
        return None if found.origin is None else Path(found.origin)
    known = sys.modules[package].__path__ if package == _OWN else found.submodule_search_locations
    folders = map(Path, known or ())
    modules = (folder.joinpath(*inside).with_suffix(".py") for folder in folders)
    return next((module for module in modules if module.is_file()), None)


@functools.lru_cache(maxsize=1 << 10)
def _find_imports(source: bytes) -> list[tuple[int, str, bool]]:
    """Return the imports of a source: the number of dots, the dotted name after them, and True if
    it is in an import statement; any other text may be a module name for `import_module`. In `from
    a import b`, b may be a module.
    """
    try:
        tree = parse_source(source)
    except SyntaxError:  # code that cannot be loaded has a digest as well
        return []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(0, alias.name, True) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = f"{node.module}." if node.module else ""
            names |= {(node.level, f"{inside}{alias.name}", True) for alias in node.names}
        elif isinstance(node, ast.Call):
            names |= {(level, name, False) for level, name in _named_in(node)}
    return sorted(one for one in names if one[0] or one[1].partition(".")[0] != _LOADED)


def _named_in(call: ast.Call) -> Iterator[tuple[int, str]]:
    """Yield the module names that texts in a call can form, alone and combined with each other."""
    texts = [
        node.value
        for node in ast.walk(call)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    texts = [text.partition(":")[0] for text in texts if _DOTTED.fullmatch(text)]
    for text in texts:
        name = text.lstrip(".")
        yield len(text) - len(name), name
        for package in texts[:_MOST_PAIRED]:
            parts = package.strip(".").split(".")
            yield from ((0, ".".join([*parts[:n], name])) for n in range(1, len(parts) + 1))
