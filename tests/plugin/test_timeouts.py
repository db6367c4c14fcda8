"""pytest-timeout's limit: when a world keeps it, and that it is one for all examples of a test."""

import pytest

from distcheck.testing import timeouts

pytest_timeout = pytest.importorskip("pytest_timeout")


@pytest.fixture
def item(request: pytest.FixtureRequest) -> pytest.Item:
    return request.node  # type: ignore[no-any-return]


def limit(seconds: float, *, method: str = "thread", despite_debugger: bool = False) -> object:
    return pytest_timeout.Settings(
        timeout=seconds, method=method, func_only=False, disable_debugger_detection=despite_debugger
    )


def test_a_world_keeps_the_limit_of_the_method_thread(item: pytest.Item) -> None:
    """Once: it is asked on while the ranks answer."""
    timeouts.record_time_limit(item, limit(1000))
    timeouts.fail_if_time_is_up(item)
    timeouts.record_time_limit(item, limit(0, method="signal"))
    timeouts.fail_if_time_is_up(item)
    timeouts.record_time_limit(item, limit(0))
    with pytest.raises(pytest.fail.Exception, match=r"^Timeout \(>0s\) from pytest-timeout\.$"):
        timeouts.fail_if_time_is_up(item)
    timeouts.fail_if_time_is_up(item)


def test_a_debugger_holds_a_world_back(item: pytest.Item, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does so with pytest-timeout."""
    monkeypatch.setattr(pytest_timeout, "SUPPRESS_TIMEOUT", True)
    timeouts.record_time_limit(item, limit(0))
    timeouts.fail_if_time_is_up(item)
    timeouts.record_time_limit(item, limit(0, despite_debugger=True))
    with pytest.raises(pytest.fail.Exception):
        timeouts.fail_if_time_is_up(item)


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_no_example_starts_when_the_time_is_up(item: pytest.Item, method: str) -> None:
    """What has failed before is told. A second run of the test is not refused for it."""
    search = timeouts.ExampleSearch(item)
    timeouts.record_time_limit(item, limit(1000, method=method))
    with pytest.raises(AssertionError), search.example({"n": 7}):
        raise AssertionError("unlike")
    timeouts.record_time_limit(item, limit(0, method=method))
    for n in (8, 9):
        with pytest.raises(BaseException, match=r"^$") as raised, search.example({"n": n}):
            pytest.fail("it started")
        assert not isinstance(raised.value, Exception), "hypothesis would go on"
    told = r"^Timeout \(>0s\) from pytest-timeout\.\nBefore, the example n=7 had failed:\nunlike$"
    with pytest.raises(pytest.fail.Exception, match=told), search.whole():
        raise raised.value
    with timeouts.ExampleSearch(item).example({"n": 9}):
        pass


def test_an_example_that_ends_after_the_time_says_so(item: pytest.Item) -> None:
    """By itself, before anybody looked at the clock: it is not the smallest one."""
    search, failure = timeouts.ExampleSearch(item), AssertionError("unlike")
    timeouts.record_time_limit(item, limit(1000))

    def fail_late() -> None:
        noted = item.stash[timeouts._KEY]
        assert noted is not None
        noted.ends_at = 0.0
        raise failure

    with pytest.raises(AssertionError) as raised, search.whole(), search.example({"n": 7}):
        fail_late()
    assert raised.value is failure
    assert raised.value.__suppress_context__
    late, example = raised.value.__notes__
    assert late == "Timeout (>1000s) from pytest-timeout. No other example is tried."
    assert example == "In the example n=7"


def test_a_timeout_between_examples_reports_the_failures(item: pytest.Item) -> None:
    search = timeouts.ExampleSearch(item)
    timeouts.record_time_limit(item, limit(1000, method="signal"))
    with pytest.raises(AssertionError), search.example({"n": 7}):
        raise AssertionError("unlike")
    with pytest.raises(pytest.fail.Exception) as raised, search.whole():
        pytest.fail("Timeout (>1000s) from pytest-timeout.")
    assert raised.value.__notes__ == ["Before, the example n=7 had failed:\nunlike"]
