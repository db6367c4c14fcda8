"""Divides a test's fixtures between the pytest process and the ranks, and sets them up on both
sides.

The pytest process sets up most fixtures once, and ranks inherit them. Fixtures that request
`world`, directly or through another fixture, are set up and torn down in every rank. In the pytest
process, a `Deferred` replaces them.
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from distcheck.testing import examples, pytest_compat
from distcheck.worlds.messages import exception_text

WORLD = "world"
# Fixtures that keep references to streams, which are per rank.
_STREAMS = ("capsys", "capsysbinary", "capteesys", "capfd", "capfdbinary")
# Fixtures that act on their process, and all that depend on them ...
OF_THE_PROCESS = (*_STREAMS, "caplog", "monkeypatch", "recwarn")
# ... and fixtures that only cannot be sent to another process.
_NOT_SENT = (
    "request", "pytestconfig", "cache", "tmp_path_factory", "tmpdir_factory", "pytester", "testdir",
    "subtests", "record_property", "record_xml_attribute", "record_testsuite_property",
)  # fmt: skip
# Fixtures that create folders within one folder of the session.
_OF_FOLDERS = {"tmp_path_factory", "tmpdir_factory"}

_inherited: list[Any] = []  # captures of the pytest process, never closed in a rank


@dataclass(frozen=True)
class Deferred:
    """Placeholder for a fixture that every rank sets up."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name} of each rank>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Define the representation for Hypothesis, which has its own for dataclasses."""
        printer.text(repr(self))


def deferred_names(item: pytest.Function, *, kept: bool) -> list[str]:
    """Return the fixtures of a test that the ranks set up, in pytest's setup order: those that
    depend on `world`. A persistent world (`kept`) adds those that change the process or cannot be
    pickled.
    """
    definitions = pytest_compat.definitions_of_fixtures(item)
    belongs = dict.fromkeys((WORLD, *(OF_THE_PROCESS if kept else ())), True)

    def decide(name: str) -> bool:
        if name not in belongs:
            belongs[name] = False  # while its own dependencies are examined
            asked = {arg for definition in definitions.get(name, ()) for arg in definition.argnames}
            belongs[name] = any(decide(arg) for arg in sorted(asked))
        return belongs[name]

    return [n for n in item.fixturenames if decide(n) or (kept and n in _NOT_SENT)]


def defer_fixtures(item: pytest.Function, names: list[str]) -> None:
    """Make pytest skip these fixtures when it sets up the test.

    They are also registered as set up. Hypothesis checks the scope of every fixture of a test, and
    rejects a fixture that is not set up again for every example; deferred ones are. If a fixture
    that is set up here requests a deferred one, that one is set up here as well.
    """
    others = [name for name in item.fixturenames if name not in names]
    needed = _arguments_of(item, others)
    for name in names:
        item.funcargs[name] = Deferred(name)
        definitions = pytest_compat.definitions_of_fixtures(item).get(name)
        if definitions and name not in needed:
            known = pytest_compat.with_session_scope(definitions[-1])
            pytest_compat.note_set_up(item, name, known)


def make_folders_base(item: pytest.Function, *, kept: bool) -> None:
    """Create the base of ranks' temporary folders in the pytest process, before it forks. Otherwise
    each rank would create one, and with --basetemp delete those of other ranks.
    """
    factory = pytest_compat.tmp_path_factory(item.config)
    if factory is not None and (kept or not _OF_FOLDERS.isdisjoint(item.fixturenames)):
        factory.getbasetemp()


def _arguments_of(item: pytest.Function, names: Iterable[str]) -> set[str]:
    definitions = pytest_compat.definitions_of_fixtures(item)
    return {arg for name in names for one in definitions.get(name, ()) for arg in one.argnames}


def values_for_ranks(item: pytest.Function) -> dict[str, Any]:
    """Return the values of fixtures of the pytest process that the ranks' fixtures request. Direct
    parameters are omitted: a rank knows them.
    """
    own = [name for name, value in item.funcargs.items() if isinstance(value, Deferred)]
    asked = _arguments_of(item, own).difference(own)
    values = {name: value for name, value in item.funcargs.items() if name in asked}
    return {n: v for n, v in values.items() if not pytest_compat.is_parameter(item, n)}


@contextmanager
def with_fixture_values(item: pytest.Function, values: dict[str, Any]) -> Iterator[None]:
    """Register these fixtures as set up for one test in a persistent rank. Clear all other fixtures
    of the item, whose values would belong to a previous test.
    """
    definitions = pytest_compat.definitions_of_fixtures(item)
    _forget_results(item)
    for name in values.keys() & definitions.keys():
        # This request looks up fixtures by name, so the cache key is not used.
        definitions[name][-1].cached_result = (values[name], None, None)
        pytest_compat.note_set_up(item, name, definitions[name][-1])
    try:
        yield
    finally:
        _forget_results(item)


def _forget_results(item: pytest.Function) -> None:
    for definitions in pytest_compat.definitions_of_fixtures(item).values():
        for definition in definitions:
            definition.cached_result = None
            pytest_compat.drop_finalizers(definition)


@contextmanager
def set_up_in_rank(item: pytest.Function) -> Iterator[dict[str, Any]]:
    """Set up the deferred fixtures and yield their values by name. Tear them down afterward,
    regardless of scope. If the block fails, its error is raised, with a note for every fixture
    whose teardown failed as well.
    """
    __tracebackhide__ = True
    names = [name for name, value in item.funcargs.items() if isinstance(value, Deferred)]
    _set_up_in_rank(item, names)
    values = {}
    try:
        for name in names:
            values[name] = item.funcargs[name] = pytest_compat.fixture_value(item, name)
        yield values
    except BaseException as error:
        undone = _torn_down(item)
        if undone is not None and not _has_failed(error):
            raise undone  # noqa: B904 - pytest shows both
        for one in _flatten_groups(undone):
            error.add_note(f"also, when fixtures were torn down: {_describe_exception(one)}")
        raise
    undone = _torn_down(item)
    if undone is not None:
        raise undone


def _set_up_in_rank(item: pytest.Function, names: list[str]) -> None:
    """Make pytest set these up here, and tear down only those: the others belong to the pytest
    process, or to an earlier test in this rank.
    """
    pytest_compat.begin_teardown(item)
    for definitions in pytest_compat.definitions_of_fixtures(item).values():
        for definition in definitions:
            pytest_compat.drop_finalizers(definition)
    for name in names:
        del item.funcargs[name]
        pytest_compat.note_not_set_up(item, name)
        for definition in pytest_compat.definitions_of_fixtures(item).get(name, ()):
            # The value is from an earlier test in this rank, or from a test outside a world.
            definition.cached_result = None


def _torn_down(item: pytest.Function) -> BaseException | None:
    """Run all finalizers by pytest itself. Return the exception they raised, if any."""
    try:
        pytest_compat.tear_down(item)
    except BaseException as error:
        return error
    return None


def _has_failed(error: BaseException) -> bool:
    """Return True unless the error means that the test was skipped, xfailed or rejected."""
    from unittest import SkipTest

    nothing = pytest.skip.Exception | pytest.xfail.Exception | SkipTest
    return not (isinstance(error, nothing) or examples.is_rejection(error))


def _flatten_groups(error: BaseException | None) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _flatten_groups(one)
    elif error is not None:
        yield error


def _describe_exception(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    first, _, _ = exception_text(error).partition("\n")
    return f"{type(error).__name__}: {first}{where}"


def resolve_deferred(value: Any, values: dict[str, Any]) -> Any:
    """Return the value that a Deferred stands for; return any other value unchanged."""
    return values[value.name] if isinstance(value, Deferred) else value


@contextmanager
def capture_per_rank(item: pytest.Function) -> Iterator[None]:
    """Make capsys and similar fixtures capture the streams of this rank."""
    captures: list[Any] = [item.funcargs[name] for name in _STREAMS if name in item.funcargs]
    captures = [capture for capture in captures if not isinstance(capture, Deferred)]
    _inherited.extend(pytest_compat.recapture(capture) for capture in captures)
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
