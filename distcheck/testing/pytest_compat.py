"""Private names of pytest without a public equivalent. Update this file when a release renames one.

`tests/plugin/test_pytest_compat.py` uses every name in the installed pytest, and so detects a
renamed one.
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

FINALIZERS = "_finalizers"  # teardown functions of a fixture definition
# Attributes with the names of all fixtures, in different releases.
NAMES_OF_FIXTURES = ("_arg2fixturedefs", "_arg2node2fixturedefs", "_arg2nodeid2fixturedefs")
_PARAMETER = "get_direct_param_fixture_func"  # the fixture function of a direct parameter

# -- a test and its fixtures -------------------------------------------------------------------


def argument_names(item: pytest.Function) -> Sequence[str]:
    """Return the arguments of a test function that are fixtures or parameters."""
    return item._fixtureinfo.argnames


def definitions_of_fixtures(item: pytest.Function) -> Mapping[str, Sequence[Any]]:
    """Return the definitions of each fixture of a test by name; pytest uses the last definition."""
    return item._fixtureinfo.name2fixturedefs


def every_definition(item: pytest.Function) -> list[Any]:
    """Return all fixtures that a test can set up, including through `request.getfixturevalue`."""
    manager: Any = item.session._fixturemanager
    known = (getattr(manager, name, {}) for name in NAMES_OF_FIXTURES)
    every = [manager.getfixturedefs(name, item) or () for names in known for name in names]
    every += definitions_of_fixtures(item).values()
    return list(dict.fromkeys(one for several in every for one in several))


def is_parameter(item: pytest.Function, name: str) -> bool:
    """Return True if a name is a direct parameter of @pytest.mark.parametrize."""
    functions = [one.func for one in definitions_of_fixtures(item).get(name, ())]
    return any(getattr(f, "__name__", "") == _PARAMETER for f in functions)


def fixture_value(item: pytest.Function, name: str) -> Any:
    """Return the value of a test's fixture, after setting it up if necessary."""
    return item._request.getfixturevalue(name)


def note_set_up(item: pytest.Function, name: str, definition: Any) -> None:
    item._request._fixture_defs[name] = definition


def note_not_set_up(item: pytest.Function, name: str) -> None:
    item._request._fixture_defs.pop(name, None)


def with_session_scope(definition: Any) -> Any:
    copied = copy.copy(definition)
    copied._scope = Scope.Session
    return copied


def drop_finalizers(definition: Any) -> None:
    """Remove the finalizers by which dependent fixtures are torn down with this one."""
    definition._finalizers.clear()


def begin_teardown(item: pytest.Function) -> None:
    """Make pytest tear down only fixtures that it sets up after this call."""
    stack = item.session._setupstate.stack
    stack.clear()
    for node in item.listchain():
        stack[node] = ([], None)


def tear_down(item: pytest.Function) -> None:
    """Make pytest run all finalizers, in its order."""
    item.session._setupstate.teardown_exact(None)


def reset_fixture_state(item: pytest.Function) -> None:
    """Reset pytest's state for the fixtures of a test of which nothing ran in this process."""
    item._initrequest()
    logs: Any = item.config.pluginmanager.getplugin("logging-plugin")
    if logs is not None:
        logs.caplog_handler.reset()
        item.stash[caplog_handler_key] = logs.caplog_handler
        item.stash[caplog_records_key] = {"call": logs.caplog_handler.records}
    item.stash[tmppath_result_key] = {}


def per_rank_state(item: pytest.Function) -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """Yield the parts of pytest's state that each rank needs separately if ranks are threads: an
    object, an attribute name, and a function that creates the initial value for a rank.
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
    """Remove the sections of a test's report with these title prefixes."""
    item._report_sections[:] = [s for s in item._report_sections if not s[1].startswith(titles)]


# -- global objects of pytest ---------------------------------------------------------------------


def tmp_path_factory(config: pytest.Config) -> Any:
    """Return the factory of tmp_path folders; None if its plugin is not active."""
    return getattr(config, "_tmp_path_factory", None)


def remove_hook(caller: Any, plugin: object) -> None:
    caller._remove_plugin(plugin)


def detach_capture(config: pytest.Config) -> Any:
    """Detach pytest's capture of the output, unchanged, from this process; return it."""
    captures: Any = config.pluginmanager.getplugin("capturemanager")
    if captures is None:
        return None
    taken, captures._global_capturing = captures._global_capturing, None
    return taken


def recapture(fixture: Any) -> Any:
    """Make capsys or a similar fixture capture the current streams; return its previous capture."""
    before, fixture._capture = fixture._capture, None
    fixture._start()
    return before
