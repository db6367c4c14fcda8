"""A strategy that is given as an object is judged, or refused; never another in its place."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from distcheck.errors import UsageError
from distcheck.verification.given_objects import names_of


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
    assert names_of(given) == (f"{__name__}:{name}",)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Sync().sync, "is not the object that ranks find as Sync.sync in "),
        (assigned, "is not the object that ranks find as once in "),
        (lambda model: None, "has no name that ranks could import"),
        (functools.partial(once), "has no name that ranks could import"),
        (Sync(), "has no name that ranks could import"),
        (None, "is of a type that is not supported"),
        (3, "is of a type that is not supported"),
        ([3], "is of a type that is not supported"),
        ({}, "is of a type that is not supported"),
    ],
)
def test_what_ranks_would_not_find_is_refused(given: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        names_of(given)  # type: ignore[arg-type]


def test_a_name_that_stands_for_something_else_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    given = once
    monkeypatch.setattr(sys.modules[__name__], "once", twice)
    with pytest.raises(UsageError, match="is not the object that ranks find"):
        names_of(given)


def test_a_script_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__file__ = "/somewhere/train.py"
    exec("def sync(model): pass", script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert names_of(script.sync) == ("/somewhere/train.py:sync",)


def test_names_are_names() -> None:
    assert names_of("ddp") == ("ddp",)
    assert names_of(["ddp", "ring"]) == ("ddp", "ring")
    assert names_of(name for name in ("ddp", Path("a.py:f"))) == ("ddp", "a.py:f")
