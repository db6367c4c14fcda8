"""The files that make up a piece of a person's code: one, and the modules beside it."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import xxhash

from distcheck.records.sources import parse_source, read_source
from distcheck.training.loading import strategy_names

_OWN = "distcheck_strategies"


def modules_beside(path: Path) -> dict[str, bytes]:
    """The modules in the file's own folder that it imports, and those that they import: contents
    by path from that folder. Nothing is imported to find out. Raises OSError.
    """
    found: dict[str, bytes] = {}
    ahead = [path]
    while ahead:
        for name in sorted(_imported(ahead.pop())):
            module, package = path.parent / f"{name}.py", path.parent / name
            files = [module] if module.is_file() else []
            if (package / "__init__.py").is_file():
                files = sorted(package.rglob("*.py"))
            for file in files:
                inside = file.relative_to(path.parent).as_posix()
                if inside not in found and file != path:
                    found[inside] = read_source(file)
                    ahead.append(file)
    return found


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


def digest_with_modules(path: Path) -> str:
    """One digest of the file and the modules beside it; "none" where it cannot be read."""
    digest = xxhash.xxh3_64()
    try:
        for name, content in {"": read_source(path), **modules_beside(path)}.items():
            digest.update(name.encode())
            digest.update(content)
    except OSError:
        return "none"
    return digest.hexdigest()


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
