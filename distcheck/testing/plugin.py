"""The pytest plugin: tests in worlds of ranks. Does not import torch until a test requests a world.

@pytest.mark.world(4)
def test_sum(world):
    ...
"""

import sys
from collections.abc import Generator
from typing import Any

import pytest

from distcheck.testing import fixtures, marker
from distcheck.worlds import turns

_HELP = (
    "world(size, backend='gloo', device='cpu', deadline_s=30, seed=0, reuse=False, schedules=0, "
    "preemptions=0, schedule=''): run the test on `size` ranks, each a process, or with "
    "backend='simulated' a thread; a list of sizes runs it once for each. The fixture `world` "
    "gives rank, size, device, group, seed, barrier() and gather(value)."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance suite."""
    group = parser.getgroup("distcheck", "gradient synchronization under test")
    for name, kind, what in (
        (
            "strategy",
            str,
            "strategy for distcheck.testing.conformance: a name, FILE.py:OBJ or MODULE:OBJ",
        ),
        ("world", int, "number of ranks for distcheck.testing.conformance"),
        ("workload", str, "workload for distcheck.testing.conformance"),
    ):
        group.addoption(
            f"--distcheck-{name}", action="append", type=kind, metavar=name.upper(), default=[],
            help=f"{what}; may be given several times",
        )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker. Under xdist, only one process at a time may run a world."""
    config.addinivalue_line("markers", _HELP)
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests that belong together")
    about = getattr(config, "workerinput", {})
    if {"testrunuid", "workercount"} <= set(about):
        turns.take_turns(about["testrunuid"], processes=about["workercount"])


def pytest_sessionfinish() -> None:
    """End persistent worlds, and wait until all worlds have exited."""
    kept = sys.modules.get("distcheck.testing.reused_worlds")
    if kept is not None:
        kept.close_all()
    _wait_for_helpers()


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Show the stacks of an interrupted test's ranks."""
    waiting = sys.modules.get("distcheck.testing.waiting")
    if waiting is not None:
        waiting.show_interrupt(terminalreporter)


def _wait_for_helpers() -> None:
    front = sys.modules.get("distcheck.testing.front")
    if front is not None:
        front.wait_for_helpers()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a list of sizes."""
    mark = marker.effective_marker(metafunc.definition)
    if mark is None:
        return
    sizes = marker.check_options(mark).sizes
    if len(sizes) > 1:
        metafunc.fixturenames.append(marker.SIZE_PARAMETER)
        ids = [f"world{size}" for size in sizes]
        metafunc.parametrize(marker.SIZE_PARAMETER, sizes, ids=ids, scope="session")


@pytest.fixture(scope="session")
def world() -> Any:
    """Return this rank's `distcheck.testing.WorldView`, in a test marked `world`."""
    from distcheck.testing import rank

    view = rank.current_view()
    if view is None:
        pytest.fail(
            "the fixture `world` is there on ranks only: mark the test with @pytest.mark.world(4); "
            "where it is marked, a fixture has to take `world` as an argument, by which it becomes "
            "the ranks' own, and cannot ask for it with request.getfixturevalue()",
            pytrace=False,
        )
    return view


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Defer the fixtures that each rank sets up."""
    options = _options(item)
    if options is None:
        _wait_for_helpers()  # an ordinary test must find the process as if there had been no world
    elif isinstance(item, pytest.Function):
        fixtures.defer_fixtures(item, fixtures.deferred_names(item, kept=options.is_shared))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test marked `world` on its ranks."""
    __tracebackhide__ = True
    options = _options(pyfuncitem)
    if options is None:
        return None
    from distcheck.testing import front

    front.run_test_in_worlds(pyfuncitem, options)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace the report of the pytest process by the reports of the ranks."""
    report = yield
    if call.excinfo is not None and report.outcome == "failed":
        longrepr = getattr(call.excinfo.value, "longrepr", None)
        if longrepr is not None and item.get_closest_marker(marker.NAME) is not None:
            if notes := getattr(call.excinfo.value, "__notes__", []):  # added by Hypothesis
                longrepr.addsection("hypothesis", "\n".join(notes))
            report.longrepr = longrepr
    return report


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Make a world enforce the limit of pytest-timeout. Tests without a world are unaffected."""
    if item.get_closest_marker(marker.NAME) is not None:
        from distcheck.testing import timeouts

        timeouts.record_time_limit(item, settings)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Send a report to the pytest process. In a rank, no other implementation is left."""
    session = sys.modules.get("distcheck.testing.session")
    if session is not None:
        session.send_subtest_report(report)


def _is_of_unittest(item: pytest.Function) -> bool:
    unittest = sys.modules.get("unittest")  # imported by any subclass of its classes
    return unittest is not None and item.cls is not None and issubclass(item.cls, unittest.TestCase)


def _options(item: pytest.Item) -> marker.WorldOptions | None:
    if item.get_closest_marker(marker.NAME) is None:
        return None
    if not isinstance(item, pytest.Function) or _is_of_unittest(item):
        pytest.fail(
            f"{item.name}: a test in a world is a plain function, or a method of a plain class",
            pytrace=False,
        )
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get(marker.SIZE_PARAMETER) if callspec is not None else None
    try:
        mark = marker.effective_marker(item)
        assert mark is not None
        return marker.options_for_size(marker.check_options(mark), size)
    except pytest.UsageError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
