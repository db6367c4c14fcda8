"""Which of a test's fixtures belong to the ranks, and how both sides set up theirs.

Fixtures are set up once, in the pytest process, and inherited by the ranks, except those that
ask for `world`, directly or through another fixture: they are set up and torn down in every
rank. In the pytest process a `Deferred` stands in their place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

WORLD = "world"
# Fixtures that hold on to streams, which every rank has of its own.
_STREAMS = ("capsys", "capsysbinary", "capteesys", "capfd", "capfdbinary")
# Fixtures that mean something in the process that uses them, and cannot be sent to another.
OF_THE_PROCESS = (*_STREAMS, "caplog", "monkeypatch", "recwarn", "request", "pytestconfig")


@dataclass(frozen=True)
class Deferred:
    """Stands for a fixture that every rank sets up for itself."""

    name: str


def deferred_names(item: pytest.Function, *, also: tuple[str, ...] = ()) -> list[str]:
    """The fixtures of a test that the ranks set up, in pytest's order of setting up.

    Those that depend on `world` or on one of `also`, and these themselves.
    """
    definitions = item._fixtureinfo.name2fixturedefs
    belongs = dict.fromkeys((WORLD, *also), True)

    def decide(name: str) -> bool:
        if name not in belongs:
            belongs[name] = False  # while its own dependencies are looked at
            asked = {arg for definition in definitions.get(name, ()) for arg in definition.argnames}
            belongs[name] = any(decide(arg) for arg in sorted(asked))
        return belongs[name]

    return [name for name in item.fixturenames if decide(name)]


def defer(item: pytest.Function, names: list[str]) -> None:
    """Before pytest fills a test's fixtures in: has it leave these alone."""
    for name in names:
        item.funcargs[name] = Deferred(name)


@contextmanager
def set_up_in_rank(item: pytest.Function) -> Iterator[dict[str, Any]]:
    """Sets up what was deferred; yields the values by name, and tears down after."""
    names = [name for name, value in item.funcargs.items() if isinstance(value, Deferred)]
    finalizers = item.session._setupstate.stack[item][0]
    before = len(finalizers)
    values = {}
    try:
        for name in names:
            del item.funcargs[name]
        for name in names:
            values[name] = item.funcargs[name] = item._request.getfixturevalue(name)
        yield values
    finally:
        while len(finalizers) > before:
            finalizers.pop()()


def fill_in(value: Any, values: dict[str, Any]) -> Any:
    """What a Deferred stands for; anything else as it is."""
    return values[value.name] if isinstance(value, Deferred) else value


@contextmanager
def own_streams(item: pytest.Function) -> Iterator[None]:
    """Has capsys and its like capture this rank's own streams, and lets go of what is left."""
    captures: list[Any] = [item.funcargs[name] for name in _STREAMS if name in item.funcargs]
    captures = [capture for capture in captures if not isinstance(capture, Deferred)]
    inherited = [capture._capture for capture in captures]  # kept, so that nothing closes them
    for capture in captures:
        capture._capture = None
        capture._start()
    try:
        yield
    finally:
        for capture in captures:
            _let_go(capture)
        del inherited


def _let_go(capture: Any) -> None:
    out, err = capture.readouterr()
    capture.close()
    for number, text in ((1, out), (2, err)):
        data = text if isinstance(text, bytes) else text.encode(errors="replace")
        with open(number, "wb", closefd=False) as stream:
            stream.write(data)
