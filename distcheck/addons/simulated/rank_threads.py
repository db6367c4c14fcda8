"""Copies the state of a pytest test for each rank of a simulated world.

If ranks are processes, they begin as copies of the pytest process. If they are threads, they share
that process, so each rank gets its own copy of the state that a test can access: pytest's state of
the test, the values of its fixtures and parameters, and the global variables of the code under
test.
"""

import ast
import copy
import functools
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distcheck.testing import fixtures, pytest_compat, session
from distcheck.worlds.jobs import ABSENT, PerRankAttributes

_HOLDING = (dict, list, set, deque, defaultdict, OrderedDict, Counter, bytearray)
# Fixtures that capture the file descriptors of a process.
_OF_DESCRIPTORS = ("capfd", "capfdbinary")
_variables: list[tuple[types.ModuleType, str]] = []  # global variables that are per rank
_memo: dict[int, Any] = {}  # of this rank's copies, by the original's id


def prepare_test(item: pytest.Function) -> None:
    """Determine the global variables to copy, and fail the test if it requests unsupported
    fixtures. Called once per test in the pytest process; all worlds of the test are forked from it.
    """
    _variables[:] = [(module, name) for module in _modules() for name in _rebound(module)]
    for name in _OF_DESCRIPTORS:
        if name in item.fixturenames:
            pytest.fail(
                f"{name} captures the output of a process, which the ranks of backend='simulated' "
                "share; use capsys",
                pytrace=False,
            )
    if hasattr(item.obj, "hypothesis"):
        pytest.fail(
            "@given needs ranks that are processes; remove backend='simulated', or draw the "
            "values in a parametrized test",
            pytrace=False,
        )


def per_rank_test_state(item: Any) -> PerRankAttributes:
    definitions = pytest_compat.every_definition(item)
    known = pytest_compat.definitions_of_fixtures(item)
    asked = {one for name in item.fixturenames for one in known.get(name, ())}
    variables = list(_variables)
    fixed = list(_per_rank_places(item))
    places = [place for place, _ in fixed]
    held = ("cached_result", pytest_compat.FINALIZERS)
    places += [(one, name) for one in definitions for name in held]

    def begin() -> list[Any]:
        memo: dict[int, Any] = {}
        own = [_copy_value(getattr(*place, ABSENT), memo) for place in variables]
        values = [memo if make is None else make() for _, make in fixed]
        for one in definitions:
            result = one.cached_result
            if result is not None and one in asked:
                result = (_copied_or_shared(result[0], memo), *result[1:])
            values += [result, list(getattr(one, pytest_compat.FINALIZERS))]
        return [*values, *own]

    return PerRankAttributes([*places, *variables], begin)


def copy_for_rank(value: Any, name: str) -> Any:
    if isinstance(value, fixtures.Deferred | types.ModuleType):
        return value
    try:
        return copy.deepcopy(value, _memo)
    except Exception as error:
        pytest.fail(
            f"{name} cannot be copied for each rank ({type(error).__name__}: {error}); make that "
            "fixture depend on `world`, so that every rank sets it up",
            pytrace=False,
        )


def body_for_rank(body: Callable[..., object]) -> Callable[..., object]:
    """Return the test function bound to this rank's copy of the test instance."""
    if not isinstance(body, types.MethodType) or isinstance(body.__self__, type):
        return body
    return types.MethodType(
        body.__func__, copy_for_rank(body.__self__, "the instance of the class")
    )


_Place = tuple[Any, str]


def _per_rank_places(item: Any) -> Iterator[tuple[_Place, Callable[[], Any] | None]]:
    """Yield the attributes that are copied in every test, each with a function that creates the
    initial value. None stands for the memo of the copies.
    """
    yield (_this_module(), "_memo"), None
    yield (session, "_line"), lambda: None
    yield (item, "funcargs"), lambda: dict(item.funcargs)
    for owner, name, make in pytest_compat.per_rank_state(item):
        yield (owner, name), make
    for name in ("filters", "showwarning", "_showwarnmsg_impl"):
        yield (warnings, name), _shallow_copy(warnings, name)
    logs = item.config.pluginmanager.getplugin("logging-plugin")
    if logs is not None:
        yield (logs.caplog_handler, "records"), list
        for handler in (logs.caplog_handler, logs.report_handler):
            yield (handler, "stream"), type(handler.stream)


def _this_module() -> types.ModuleType:
    import distcheck.addons.simulated.rank_threads as here

    return here


def _shallow_copy(owner: Any, name: str) -> Callable[[], Any]:
    value = getattr(owner, name)
    return lambda: list(value) if isinstance(value, list) else value


def _modules() -> list[types.ModuleType]:
    from distcheck.addons.simulated.isolation import code_under_test

    return code_under_test()


@functools.cache
def _declared_globals(file: str) -> frozenset[str]:
    """Return the names that functions of a source file declare `global`."""
    try:
        text = Path(file).read_text()
        tree = ast.parse(text) if "global" in text else None
    except (OSError, ValueError, SyntaxError):
        tree = None
    nodes = () if tree is None else ast.walk(tree)
    return frozenset(n for node in nodes if isinstance(node, ast.Global) for n in node.names)


def _rebound(module: types.ModuleType) -> list[str]:
    """Return the global variables of a module that its functions may change: those declared
    `global`, and those whose values are copied for each rank.
    """
    held = [name for name, value in vars(module).items() if _is_copied(value)]
    found = {name for name in held if not name.startswith(("__", "@"))}
    return sorted(found | _declared_globals(module.__file__ or ""))


def _is_copied(value: object) -> bool:
    import torch

    return type(value) in _HOLDING or isinstance(value, torch.Tensor | torch.nn.Module)


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Return a rank's copy of a global variable, including nested containers, tensors and models.
    Other objects are shared, because they may be referenced elsewhere as well.
    """
    if not _is_copied(value) or id(value) in memo:
        return memo.get(id(value), value)
    if type(value) in _HOLDING:
        made = memo[id(value)] = copy.copy(value)
        memo.setdefault(id(memo), []).append(value)  # as in deepcopy: its id must stay unique
        if isinstance(made, dict):
            made.update({key: _copy_value(inner, memo) for key, inner in value.items()})
        elif not isinstance(made, set | bytearray):
            for place, inner in enumerate(value):
                made[place] = _copy_value(inner, memo)
        return made
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # for example a tensor within a graph
        return value


def _copied_or_shared(value: Any, memo: dict[int, Any]) -> Any:
    """Return a rank's copy of the value of a fixture. The value is shared if it cannot be copied,
    because the rank may never use it.
    """
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value
