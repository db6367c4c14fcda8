"""A process that has run the ranks of one simulated world is as it was before the first of them."""

import importlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules
from torch.nn.modules.module import register_module_forward_hook

from distcheck.addons.simulated import patches as patches_module
from distcheck.addons.simulated.isolation import Isolation
from distcheck.addons.simulated.patches import Patches
from distcheck.worlds.jobs import ABSENT, PerRankAttributes

NAME = "kept_by_a_rank"


OWNER = SimpleNamespace(value=2)


@pytest.fixture(autouse=True)
def no_packages_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches_module._watching, "of_packages", [])


def imports(folder: Path) -> None:
    (folder / f"{NAME}.py").write_text("count = 1")
    sys.path.insert(0, str(folder))
    __import__(NAME)


def patches(folder: Path) -> None:
    (folder / f"{NAME}.py").write_text(
        "import torch\n"
        "torch.distributed.all_reduce = 1\n"
        "torch.of_a_rank = 2\n"
        "def method():\n"
        "    setattr(torch.nn.Linear, 'forward', 3)\n"
        "method()\n"
        "for name in ('broadcast', 'reduce'):\n"
        "    setattr(torch.distributed, name, 4)\n"
    )
    sys.path.insert(0, str(folder))
    __import__(NAME)


def patched() -> object:
    there = torch.distributed
    of_torch = there.all_reduce, there.broadcast, there.reduce, torch.nn.Linear.forward
    return *of_torch, hasattr(torch, "of_a_rank")


LEFT: dict[str, tuple[Callable[[Path], object], Callable[[], object]]] = {
    "a module": (imports, lambda: NAME in sys.modules),
    "the environment": (
        lambda _: os.environ.update({NAME: "1"}), lambda: os.environ.get(NAME)
    ),
    "the working directory": (os.chdir, os.getcwd),
    "the default dtype": (
        lambda _: torch.set_default_dtype(torch.float64), torch.get_default_dtype
    ),
    "torch's random numbers": (
        lambda _: torch.manual_seed(5), lambda: torch.default_generator.get_state().tolist()
    ),
    "Python's random numbers": (lambda _: random.seed(5), random.getstate),
    "what it sets in torch": (patches, patched),
    "a hook of all modules": (
        lambda _: register_module_forward_hook(print), lambda: len(modules._global_forward_hooks)
    ),
    "a filter of warnings": (
        lambda _: warnings.simplefilter("error"), lambda: list(warnings.filters)
    ),
    "a handler of the root logger": (
        lambda _: logging.getLogger().addHandler(logging.NullHandler()),
        lambda: len(logging.getLogger().handlers),
    ),
    "a flag of torch": (
        lambda _: torch.backends.mkldnn.set_flags(False), lambda: torch.backends.mkldnn.enabled
    ),
    "what a job owns": (lambda _: setattr(OWNER, "value", 5), lambda: OWNER.value),
    "the output": (lambda _: setattr(sys, "stdout", StringIO()), lambda: id(sys.stdout)),
}  # fmt: skip


def lives(changes: Callable[[Path], object], seen: Callable[[], object], folder: Path) -> int:
    """0 if a rank sees its change, the other rank does not, and nothing is left of it after the
    world's end.
    """
    before = seen()
    owned = PerRankAttributes(
        [(OWNER, name) for name in ("value", "other", "gone")], lambda: [2, 3, ABSENT]
    )
    isolation = Isolation([{}, {}], [(sys.stdout, sys.stderr)] * 2, owned)
    isolation.begin(0)
    changes(folder)
    changed = seen() != before
    OWNER.other = OWNER.gone = 1
    isolation.switch(0, 1)
    apart = seen() == before
    assert (OWNER.other, hasattr(OWNER, "gone")) == (3, False)
    isolation.switch(1, 0)
    kept = seen() != before
    isolation.end()
    return 0 if changed and apart and kept and seen() == before else 1


@pytest.mark.parametrize("what", LEFT)
def test_nothing_is_left_of_a_world(what: str, tmp_path: Path) -> None:
    """In a copy of this process, which would not be as it was if this failed."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(lives(*LEFT[what], tmp_path))
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_package_globals_are_per_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that functions of a package assign which code under test imports."""
    (tmp_path / "kept_library.py").write_text(
        "STATE, ALIKE = 0, [0]\n"
        "class Kept:\n"
        "    def keep(self, value):\n"
        "        global STATE, LATER\n"
        "        STATE = LATER = value\n"
        "        ALIKE[0] = value\n"
    )
    (tmp_path / f"{NAME}.py").write_text("import kept_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    patches = Patches(lambda module: module.__name__ == NAME, libraries=())
    try:
        importlib.import_module(NAME)
        kept = sys.modules["kept_library"]
        ranks: list[list[Any]] = [[], []]
        for rank in (0, 1):
            patches.give(ranks[rank])
            assert (kept.STATE, hasattr(kept, "LATER")) == (0, False)
            kept.Kept().keep(rank + 1)
            ranks[rank] = patches.take()
        for rank in (0, 1):
            patches.give(ranks[rank])
            assert (rank + 1, rank + 1) == (kept.STATE, kept.LATER)
            assert kept.ALIKE == [2], "what is changed in place is shared"
    finally:
        patches.end()
    assert (kept.STATE, hasattr(kept, "LATER")) == (0, False)
    again = Patches(lambda module: module.__name__ == NAME, libraries=())  # of the next world
    kept.STATE = 5  # type: ignore[attr-defined]
    again.end()
    assert kept.STATE == 0
    del sys.modules[NAME], sys.modules["kept_library"]


def test_an_imported_package_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports others on its own, whose state is of no rank."""
    (tmp_path / "kept_library.py").write_text(
        "STATE = 0\ndef keep():\n    global STATE\n    STATE = 1\n"
    )
    (tmp_path / "like_torch").mkdir()
    (tmp_path / "like_torch" / "__init__.py").write_text("import kept_library\n")
    (tmp_path / f"{NAME}.py").write_text("import like_torch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = str(tmp_path / "like_torch") + os.sep
    patches = Patches(lambda module: module.__name__ == NAME, libraries=(folder,))
    try:
        importlib.import_module(NAME)
        assert patches.take() == []
    finally:
        patches.end()
    for name in (NAME, "kept_library", "like_torch"):
        del sys.modules[name]


def test_modules_that_code_makes_are_a_ranks_own_and_those_of_packages_are_not() -> None:
    isolation = Isolation([{}, {}], [(sys.stdout, sys.stderr)] * 2)
    isolation.begin(0)
    sys.modules[NAME] = ModuleType(NAME)
    sys.modules["json.of_a_package"] = ModuleType("json.of_a_package")
    isolation.switch(0, 1)
    assert NAME not in sys.modules
    assert sys.modules.pop("json.of_a_package")  # so that all modules are looked at
    sys.modules["of_the_other"] = ModuleType("of_the_other")
    isolation.switch(1, 0)
    assert (NAME in sys.modules, "of_the_other" in sys.modules) == (True, False)
    assert sys.modules["torch.ops"] is torch.ops
    isolation.end()
    assert NAME not in sys.modules
