"""A process that has run the ranks of one simulated world is as it was before the first of them."""

import os
import random
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distcheck.worlds.simulated.isolation import Isolation
from distcheck.worlds.simulated.owned import ABSENT, Owned

NAME = "kept_by_a_rank"


OWNER = SimpleNamespace(value=1)


def imports(folder: Path) -> None:
    (folder / f"{NAME}.py").write_text("count = 1")
    sys.path.insert(0, str(folder))
    __import__(NAME)


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
    "what a job owns": (lambda _: setattr(OWNER, "value", 5), lambda: OWNER.value),
    "the output": (lambda _: setattr(sys, "stdout", StringIO()), lambda: id(sys.stdout)),
}  # fmt: skip


def lives(changes: Callable[[Path], object], seen: Callable[[], object], folder: Path) -> int:
    """0 if a rank saw its change, and nothing of it is there after the world's end."""
    before = seen()
    owned = Owned([(OWNER, "value"), (OWNER, "other")], lambda: [2, ABSENT])
    isolation = Isolation([{}, {}], [(sys.stdout, sys.stderr)] * 2, owned)
    isolation.begin(0)
    changes(folder)
    changed = seen() != before
    OWNER.other = 1
    isolation.switch(0, 1)
    assert (OWNER.value, hasattr(OWNER, "other")) == (2, False)
    isolation.switch(1, 0)
    isolation.end()
    return 0 if changed and seen() == before else 1


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
