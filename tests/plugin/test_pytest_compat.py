"""Each private name of pytest is in the pytest that is installed, and does what is relied on."""

from collections.abc import Iterator
from typing import Any

import pytest

from distcheck.testing import pytest_compat


@pytest.fixture
def item(request: pytest.FixtureRequest) -> pytest.Function:
    assert isinstance(request.node, pytest.Function)
    return request.node


@pytest.fixture
def made() -> Iterator[list[str]]:
    """Notes that it was torn down."""
    seen: list[str] = []
    yield seen
    seen.append("torn down")


@pytest.mark.parametrize("number", [7])
def test_fixtures_and_parameters_of_a_test(item: pytest.Function, number: int) -> None:
    assert set(pytest_compat.argument_names(item)) == {"item", "number"}
    assert pytest_compat.definitions_of_fixtures(item)["item"][-1].argnames == ("request",)
    assert pytest_compat.is_parameter(item, "number")
    assert not pytest_compat.is_parameter(item, "item")


def test_every_fixture_is_listed(item: pytest.Function) -> None:
    manager: Any = item.session._fixturemanager  # type: ignore[attr-defined]
    assert any(hasattr(manager, name) for name in pytest_compat.NAMES_OF_FIXTURES)
    names = {one.argname for one in pytest_compat.every_definition(item)}
    assert {"item", "made", "capsys", "tmp_path_factory"} <= names


def test_what_was_set_up_is_known_until_it_is_taken_back(item: pytest.Function) -> None:
    definition = pytest_compat.definitions_of_fixtures(item)["item"][-1]
    known = item._request._fixture_defs  # type: ignore[attr-defined]
    assert known["item"] is definition
    pytest_compat.note_not_set_up(item, "item")
    assert "item" not in known
    pytest_compat.note_set_up(item, "item", definition)
    assert pytest_compat.fixture_value(item, "item") is item


def test_a_fixture_with_the_scope_of_the_session(item: pytest.Function) -> None:
    definition = pytest_compat.definitions_of_fixtures(item)["item"][-1]
    assert pytest_compat.with_session_scope(definition).scope == "session"
    assert definition.scope == "function"


class Test:
    def test_only_what_is_set_up_from_now_on_is_torn_down(self, item: pytest.Function) -> None:
        """By a copy of pytest's state, to which the test's own is put back."""
        owned = [(o, n, getattr(o, n), make) for o, n, make in pytest_compat.per_rank_state(item)]
        assert [name for _, name, *_ in owned][:2] == ["_request", "_setupstate"]
        try:
            for owner, name, _, make in owned:
                setattr(owner, name, make())
            pytest_compat.begin_teardown(item)
            seen = pytest_compat.fixture_value(item, "made")
            assert seen == []
            pytest_compat.tear_down(item)
            assert seen == ["torn down"]
        finally:
            for owner, name, before, _ in owned:
                setattr(owner, name, before)


def test_finalizers_of_a_fixture_are_dropped(item: pytest.Function, made: list[str]) -> None:
    definition = pytest_compat.definitions_of_fixtures(item)["made"][-1]
    held: list[Any] = getattr(definition, pytest_compat.FINALIZERS)
    kept = list(held)
    assert kept
    pytest_compat.drop_finalizers(definition)
    assert not getattr(definition, pytest_compat.FINALIZERS)
    for one in kept:
        definition.addfinalizer(one)


BEGINS_AGAIN = """
from distcheck.testing import pytest_compat

def test_it(request):
    _, other = request.session.items
    assert other.funcargs == {}
    other.funcargs["of_another_run"] = 1
    before = other._request
    pytest_compat.reset_fixture_state(other)
    assert other.funcargs == {}
    assert other._request is not before
    assert other.stash[pytest_compat.caplog_handler_key].records == []
    assert other.stash[pytest_compat.caplog_records_key] == {"call": []}
    assert other.stash[pytest_compat.tmppath_result_key] == {}
    assert pytest_compat.tmp_path_factory(other.config).getbasetemp().is_dir()

def test_other(caplog, tmp_path):
    assert caplog.records == []
    assert tmp_path.is_dir()
"""


def test_a_test_begins_again(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BEGINS_AGAIN)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_sections_of_a_report_are_dropped(item: pytest.Function) -> None:
    item.add_report_section("call", "mine of rank 0", "text")
    item.add_report_section("call", "other", "text")
    pytest_compat.drop_sections(item, ("mine",))
    assert [title for _, title, _ in item._report_sections] == ["other"]


def test_a_hook_is_taken_off(pytester: pytest.Pytester) -> None:
    class Plugin:
        def pytest_report_header(self) -> str:
            return "mine"

        def pytest_report_teststatus(self) -> None: ...

    config = pytester.parseconfig()
    plugin = Plugin()
    config.pluginmanager.register(plugin)
    pytest_compat.remove_hook(config.hook.pytest_report_header, plugin)
    left = [one.plugin for one in config.hook.pytest_report_header.get_hookimpls()]
    assert plugin not in left
    left = [one.plugin for one in config.hook.pytest_report_teststatus.get_hookimpls()]
    assert plugin in left


def test_capsys_captures_anew(capsys: pytest.CaptureFixture[str]) -> None:
    before = pytest_compat.recapture(capsys)
    print("hello")
    assert capsys.readouterr().out == "hello\n"
    capsys.close()
    capsys._capture = before  # type: ignore[attr-defined]


def test_what_captures_the_process_is_let_go_of(request: pytest.FixtureRequest) -> None:
    captures: Any = request.config.pluginmanager.getplugin("capturemanager")
    before = captures._global_capturing
    assert before is not None
    taken = pytest_compat.detach_capture(request.config)
    try:
        assert taken is before
        assert captures._global_capturing is None
    finally:
        captures._global_capturing = before
