"""Names of pytest that have no public counterpart: one place to mend when a release moves one.

`tests/plugin/test_pytest_compat.py` uses every one of them in the pytest that is installed, and so
says which of them a release has moved.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntry,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest.logging import caplog_handler_key, caplog_records_key
from _pytest.runner import SetupState
from _pytest.scope import Scope
from _pytest.tmpdir import tmppath_result_key

__all__ = [
    "ExceptionChainRepr", "ReprEntry", "ReprEntryNative", "ReprExceptionInfo", "ReprFileLocation",
    "ReprTraceback",
]  # fmt: skip

FINALIZERS = "_finalizers"  # of what was set up on a fixture
# Where releases keep the names of all fixtures.
NAMES_OF_FIXTURES = ("_arg2fixturedefs", "_arg2node2fixturedefs", "_arg2nodeid2fixturedefs")
_PARAMETER = "get_direct_param_fixture_func"  # what makes a direct parameter's value

# -- a test and its fixtures -------------------------------------------------------------------


def argument_names(item: pytest.Function) -> Sequence[str]:
    """The arguments of a test's function that are fixtures or parameters."""
    return item._fixtureinfo.argnames


def definitions(item: pytest.Function) -> Mapping[str, Sequence[Any]]:
    """By the name of each fixture of a test, those that have it: the last one counts."""
    return item._fixtureinfo.name2fixturedefs


def every_definition(item: pytest.Function) -> list[Any]:
    """All fixtures that a test could set up, also by `request.getfixturevalue`."""
    manager: Any = item.session._fixturemanager
    known = (getattr(manager, name, {}) for name in NAMES_OF_FIXTURES)
    every = [manager.getfixturedefs(name, item) or () for names in known for name in names]
    every += definitions(item).values()
    return list(dict.fromkeys(one for several in every for one in several))


def is_parameter(item: pytest.Function, name: str) -> bool:
    """Whether a name stands for a direct parameter, by @pytest.mark.parametrize."""
    functions = [one.func for one in definitions(item).get(name, ())]
    return any(getattr(f, "__name__", "") == _PARAMETER for f in functions)


def fixture_value(item: pytest.Function, name: str) -> Any:
    """Sets a fixture of a test up, unless it is."""
    return item._request.getfixturevalue(name)


def note_set_up(item: pytest.Function, name: str, definition: Any) -> None:
    """Has pytest take a fixture of a test for one that was set up."""
    item._request._fixture_defs[name] = definition


def note_not_set_up(item: pytest.Function, name: str) -> None:
    item._request._fixture_defs.pop(name, None)


def of_session(definition: Any) -> Any:
    """A copy of a fixture, with the scope of the session."""
    copied = copy.copy(definition)
    copied._scope = Scope.Session
    return copied


def drop_finalizers(definition: Any) -> None:
    """Forgets what was set up on a fixture, and would be torn down before it."""
    definition._finalizers.clear()


def begin_teardown(item: pytest.Function) -> None:
    """Makes pytest tear down what it sets up from now on for a test, and nothing else."""
    stack = item.session._setupstate.stack
    stack.clear()
    for node in item.listchain():
        stack[node] = ([], None)


def tear_down(item: pytest.Function) -> None:
    """Runs all finalizers, in pytest's order and by its own hand."""
    item.session._setupstate.teardown_exact(None)


def begin_again(item: pytest.Function) -> None:
    """Readies pytest's own state for fixtures of a test of which nothing ran in this process."""
    item._initrequest()
    logs: Any = item.config.pluginmanager.getplugin("logging-plugin")
    if logs is not None:
        logs.caplog_handler.reset()
        item.stash[caplog_handler_key] = logs.caplog_handler
        item.stash[caplog_records_key] = {"call": logs.caplog_handler.records}
    item.stash[tmppath_result_key] = {}


def own_state(item: pytest.Function) -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """What of pytest's state a rank that is a thread has of its own: an object, a name in it, what
    makes the first value of a rank.
    """

    def own_request() -> Any:
        request: Any = copy.copy(item._request)
        request._fixture_defs = dict(request._fixture_defs)
        return request

    yield item, "_request", own_request
    yield item.session, "_setupstate", SetupState
    captures = item.config.pluginmanager.getplugin("capturemanager")
    if captures is not None:
        yield captures, "_capture_fixture", lambda: None


def drop_sections(item: pytest.Function, titles: tuple[str, ...]) -> None:
    """Takes off the sections of a test's report whose titles begin so."""
    item._report_sections[:] = [s for s in item._report_sections if not s[1].startswith(titles)]


# -- what pytest has one of --------------------------------------------------------------------


def folders(config: pytest.Config) -> Any:
    """What makes the folders of tmp_path; None without that plugin."""
    return getattr(config, "_tmp_path_factory", None)


def remove_hook(caller: Any, plugin: object) -> None:
    """Takes a plugin's implementation of one hook off."""
    caller._remove_plugin(plugin)


def take_capture_off(config: pytest.Config) -> Any:
    """Lets go of what captures the output of the process, as it is; returns it."""
    captures: Any = config.pluginmanager.getplugin("capturemanager")
    if captures is None:
        return None
    taken, captures._global_capturing = captures._global_capturing, None
    return taken


def capture_anew(fixture: Any) -> Any:
    """Makes capsys, or its like, capture the streams that are there now; returns what captured
    before, as it is.
    """
    before, fixture._capture = fixture._capture, None
    fixture._start()
    return before
