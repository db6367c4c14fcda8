"""The files that make up a piece of a person's code: one, and the modules next to it."""

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from pathlib import Path

from distcheck.records.sources import parse_source, read_source
from distcheck.training.loading import strategy_names

NO_DIGEST = "none"
_OWN = "distcheck_strategies"
_COMPILED = (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_CACHE = "__pycache__"  # not read: loading.py switches it off for code that was handed over
_DIGITS = 32  # of SHA-256: 128 bits, so that a second file with it cannot be made


def modules_beside(path: Path) -> dict[str, bytes]:
    """The modules in the file's own folder that it imports, and those that they import: sources
    by path from that folder. Nothing is imported to find out. Raises OSError.
    """
    return {name: data for name, data in files_beside(path).items() if name.endswith(".py")}


def files_beside(path: Path) -> dict[str, bytes]:
    """The same with compiled modules, which Python imports as well."""
    found: dict[str, bytes] = {}
    ahead = [path]
    while ahead:
        for name in sorted(_imported(ahead.pop())):
            module, package = path.parent / name, path.parent / name / "__init__"
            files = [Path(f"{module}{end}") for end in (".py", *_COMPILED)]
            if any(Path(f"{package}{end}").is_file() for end in (".py", *_COMPILED)):
                files = sorted(module.rglob("*"))
            for file in files:
                inside = file.relative_to(path.parent).as_posix()
                is_code = file.name.endswith((".py", *_COMPILED)) and file.parent.name != _CACHE
                if is_code and file.is_file() and inside not in found and file != path:
                    found[inside] = read_source(file)
                    ahead += [file] if file.suffix == ".py" else []
    return found


def digest_of_sources(files: Mapping[str, bytes]) -> str:
    """Return one digest of the contents and the names of files; "none" if there are none."""
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    return digest_of(digests) if files else NO_DIGEST


def digest_of(digests: Mapping[str, bytes]) -> str:
    """Return one digest of files, whose own are given by their names."""
    lines = (f"{digest.hex()} {name}" for name, digest in sorted(digests.items()))
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:_DIGITS]


def mentions(pattern: str, spec: str) -> bool:
    """Whether the text of a strategy that is given by name, file or module, or a module beside it
    that it imports, has what a regular expression matches. Nothing is imported to find out.
    """
    path = _file_of(spec)
    if path is None:
        return False
    try:
        texts = [read_source(path), *modules_beside(path).values()]
    except OSError:
        return False
    return any(re.search(pattern.encode(), text) for text in texts)


def promises_of(spec: str) -> dict[str, object]:
    """The words of the decorator of a strategy that is given as file, name or module, as in
    `@strategy(loss="tokens")`, where they are constants. Nothing is imported to find out.
    """
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
    """Where the code of a strategy is; None where that cannot be said without an import."""
    what, _, _ = spec.partition(":")
    if what.endswith(".py"):
        return Path(what)
    point = strategy_names().get(spec)
    package, *inside = (what if point is None else point.value.partition(":")[0]).split(".")
    if package == _OWN:  # which may be imported; of a checkout, only that tells where its files are
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


def _imported(path: Path) -> set[str]:
    try:
        tree = parse_source(path)
    except SyntaxError:  # code that cannot be loaded has a digest as well
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            names |= {module} if module else {alias.name for alias in node.names}
    return names
