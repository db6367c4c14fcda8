"""The files that make up a piece of a person's code: one, and the modules beside it."""

import ast
from pathlib import Path

import xxhash


def modules_beside(path: Path) -> dict[str, bytes]:
    """The modules in the file's own folder that it imports, and those that they import: contents
    by path from that folder. Nothing is imported to find out.
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
                    found[inside] = file.read_bytes()
                    ahead.append(file)
    return found


def digest_with_modules(path: Path) -> str:
    """One digest of the file and the modules beside it; "none" where it cannot be read."""
    digest = xxhash.xxh3_64()
    try:
        for name, content in {"": path.read_bytes(), **modules_beside(path)}.items():
            digest.update(name.encode())
            digest.update(content)
    except OSError:
        return "none"
    return digest.hexdigest()


def _imported(path: Path) -> set[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # code that cannot be loaded has a digest as well
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            names |= {module} if module else {alias.name for alias in node.names}
    return names
