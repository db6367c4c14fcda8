"""Which of a test's fixtures belong to the ranks, and how both sides set up theirs.

Fixtures are set up once, in the pytest process, and inherited by the ranks, except those that
ask for `world`, directly or through another fixture: they are set up and torn down in every
rank. In the pytest process a `Deferred` stands in their place.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.scope import Scope

WORLD = "world"
# Fixtures that hold on to streams, which every rank has of its own.
_STREAMS = ("capsys", "capsysbinary", "capteesys", "capfd", "capfdbinary")
# Fixtures that act on the process that uses them, with whatever is built on them ...
OF_THE_PROCESS = (*_STREAMS, "caplog", "monkeypatch", "recwarn")
# ... and those that only cannot be sent to another.
_NOT_SENT = ("request", "pytestconfig", "subtests", "record_property")

_inherited: list[Any] = []  # captures of the pytest process, never closed in a rank


@dataclass(frozen=True)
class Deferred:
    """Stands for a fixture that every rank sets up for itself."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name} of each rank>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How hypothesis shows it among the arguments of an example; it knows dataclasses."""
        printer.text(repr(self))


def deferred_names(item: pytest.Function, *, kept: bool) -> list[str]:
    """The fixtures of a test that the ranks set up, in pytest's order of setting up: those that
    depend on `world`; in a kept world, also what acts on the process or cannot be sent.
    """
    definitions = item._fixtureinfo.name2fixturedefs
    belongs = dict.fromkeys((WORLD, *(OF_THE_PROCESS if kept else ())), True)

    def decide(name: str) -> bool:
        if name not in belongs:
            belongs[name] = False  # while its own dependencies are looked at
            asked = {arg for definition in definitions.get(name, ()) for arg in definition.argnames}
            belongs[name] = any(decide(arg) for arg in sorted(asked))
        return belongs[name]

    return [n for n in item.fixturenames if decide(n) or (kept and n in _NOT_SENT)]


def defer(item: pytest.Function, names: list[str]) -> None:
    """Before pytest fills a test's fixtures in: has it leave these alone.

    They are entered as set up, too: hypothesis asks for the scope of every fixture of a test, and
    refuses one that is not set up anew for every example. These are.
    """
    for name in names:
        item.funcargs[name] = Deferred(name)
        definitions = item._fixtureinfo.name2fixturedefs.get(name)
        if definitions:
            known: Any = copy.copy(definitions[-1])
            known._scope = Scope.Session
            item._request._fixture_defs[name] = known


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
            item._request._fixture_defs.pop(name, None)
            for definition in item._fixtureinfo.name2fixturedefs.get(name, ()):
                # From an earlier test in this rank, or one that asked for it outside of a world.
                definition.cached_result = None
                definition._finalizers.clear()
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
    _inherited.extend(capture._capture for capture in captures)
    for capture in captures:
        capture._capture = None
        capture._start()
    try:
        yield
    finally:
        for capture in captures:
            _let_go(capture)


def _let_go(capture: Any) -> None:
    out, err = capture.readouterr()
    capture.close()
    for number, text in ((1, out), (2, err)):
        data = text if isinstance(text, bytes) else text.encode(errors="replace")
        with open(number, "wb", closefd=False) as stream:
            stream.write(data)
