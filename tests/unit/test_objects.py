"""A strategy that is given as an object is judged, or refused; never another in its place."""

import functools
import linecache
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from distcheck.errors import UsageError
from distcheck.verification.given_objects import importable_names


def doubles(strategy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(strategy)
    def doubled(model: object) -> None:
        strategy(model)
        strategy(model)

    return doubled


def once(model: object) -> None: ...


@doubles
def twice(model: object) -> None: ...


assigned = doubles(once)


class Sync:
    def sync(self, model: object) -> None: ...

    @classmethod
    def of_the_class(cls, model: object) -> None: ...

    @staticmethod
    def of_nobody(model: object) -> None: ...

    def __call__(self, model: object) -> None: ...


@pytest.mark.parametrize(
    ("given", "name"),
    [(once, "once"), (twice, "twice"), (Sync, "Sync"), (Sync.sync, "Sync.sync"),
     (Sync.of_the_class, "Sync.of_the_class"), (Sync.of_nobody, "Sync.of_nobody")],
)  # fmt: skip
def test_what_its_module_has_under_its_name(given: Callable[..., None], name: str) -> None:
    assert importable_names(given) == (f"{__name__}:{name}",)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Sync().sync, "is not the object that ranks import as Sync.sync in "),
        (assigned, "is not the object that ranks import as once in "),
        (lambda model: None, "has no importable name"),
        (functools.partial(once), "has no importable name"),
        (Sync(), "has no importable name"),
        (None, "is of an unsupported type"),
        (3, "is of an unsupported type"),
        ([3], "is of an unsupported type"),
        ({}, "is of an unsupported type"),
    ],
)
def test_what_ranks_would_not_find_is_refused(given: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        importable_names(given)  # type: ignore[arg-type]


def test_a_name_that_stands_for_something_else_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    given = once
    monkeypatch.setattr(sys.modules[__name__], "once", twice)
    with pytest.raises(UsageError, match="is not the object that ranks import"):
        importable_names(given)


def test_a_script_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__file__ = "/somewhere/train.py"
    exec("def sync(model): pass", script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert importable_names(script.sync) == ("/somewhere/train.py:sync",)


class Notebook:
    """`__main__` of a notebook: cells whose source Python can find, and no file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.module = ModuleType("__main__")
        self._monkeypatch = monkeypatch
        monkeypatch.setitem(sys.modules, "__main__", self.module)
        monkeypatch.chdir(folder)

    def cell(self, text: str) -> None:
        name = f"<cell {len(text)} {hash(text)}>"
        lines = text.splitlines(keepends=True)
        self._monkeypatch.setitem(linecache.cache, name, (len(text), None, lines, name))
        exec(compile(text, name, "exec"), vars(self.module))

    def copy_of(self, name: str) -> ModuleType:
        """What ranks import."""
        ((path, own),) = (named.split(":") for named in importable_names(vars(self.module)[name]))
        assert (own, Path(path).parent) == (name, Path(".distcheck/cells"))
        made = ModuleType("copy")
        exec(compile(Path(path).read_text(), path, "exec"), vars(made))
        return made


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Notebook:
    return Notebook(monkeypatch, tmp_path)


def test_a_cell_is_copied_with_what_it_names(notebook: Notebook) -> None:
    notebook.cell(
        "import xml.etree as tree, json\n"
        "from functools import wraps\nfrom math import floor as down, tau\n"
        "import torch\nKIND = torch.float64\n"
        "SIZES, unused = {'a': [1, (2.5, None)]}, object()\np = object()\n"
        "def sum(xs): return -1\n"
    )
    notebook.cell(
        "from __future__ import annotations\ndef doubles(f):\n    @wraps(f)\n"
        "    def doubled(m: Missing):\n        return 2 * f(m)\n    return doubled\n"
    )
    notebook.cell(
        "x = 1\n@doubles\ndef sync(model):\n    for p in [1, 2]:\n        json.dumps(p)\n"
        "    return helper(p) + down(2.5) + tau + sum([])\n\n"
        "def helper(p):\n    return len(SIZES['a']) + p if p else sync(p)\n"
        "class Sync:\n    kind = KIND\n    def sync(self, model):\n"
        "        return tree.ElementTree, Sync, sync(model)\n"
    )
    copy = notebook.copy_of("sync")
    assert copy.sync(None) == notebook.module.sync(None) == 2 * (4 + 2 + math.tau - 1)
    assert not {"unused", "p", "x"} & vars(copy).keys()
    again = notebook.copy_of("Sync")
    assert again.Sync.kind is torch.float64
    assert again.Sync().sync(None)[1:] == (again.Sync, copy.sync(None))
    assert (
        "import xml.etree.ElementTree"
        in Path(importable_names(notebook.module.Sync)[0][:-5]).read_text()
    )
    changed = importable_names(notebook.module.sync)
    Path(changed[0].removesuffix(":sync")).write_text("edited")
    assert notebook.copy_of("sync").sync(None) == copy.sync(None)
    notebook.cell("SIZES = {'a': []}\n")
    assert (
        importable_names(notebook.module.sync) != changed
    )  # no rank is given what was true before


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("t = object()\ndef sync(model): return t", "uses t, a object, which ranks cannot import"),
        ("nan = float('nan')\ndef sync(model): nan",
         "uses nan, a float, which ranks cannot import"),
        ("s = [object()]\ndef sync(model): return s", "uses s, a list, which ranks cannot import"),
        ("exec('def sync(model): pass')", "the source of sync is not available"),
        ("exec('def f(): pass')\ndef sync(m): f()", "the source of f is not available"),
    ],
)  # fmt: skip
def test_what_cannot_be_copied_is_refused(notebook: Notebook, cell: str, why: str) -> None:
    notebook.cell(cell)
    with pytest.raises(UsageError, match=f"{why}.+file.py:sync"):
        importable_names(notebook.module.sync)
    assert not Path(".distcheck/cells").exists()


@pytest.mark.parametrize("guard", ["", "if __name__ == '__main__':"])
def test_a_script_that_would_run_once_more_is_copied(tmp_path: Path, guard: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from distcheck.verification.given_objects import importable_names\n"
        f"def sync(model): pass\n{guard or 'if True:'}\n    print(*importable_names(sync))\n"
    )
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    named = ran.stdout.strip()
    assert named == f"{script}:sync" if guard else named.startswith(".distcheck/cells/sync-")


def test_names_are_names() -> None:
    assert importable_names("ddp") == ("ddp",)
    assert importable_names(["ddp", "ring"]) == ("ddp", "ring")
    assert importable_names(name for name in ("ddp", Path("a.py:f"))) == ("ddp", "a.py:f")
