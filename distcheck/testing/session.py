"""In a rank: a copy of pytest's session that reports only to the pytest process."""

import pdb
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from distcheck.testing.messages import RankReport, Subtest, encode_message
from distcheck.testing.pytest_compat import detach_capture, remove_hook

# Hooks by which a report reaches the terminal, a file or a debugger, which all belong to the pytest
# process.
_OUTWARD = ("pytest_runtest_logreport", "pytest_exception_interact")
# Plugins of pytest that report uncaught exceptions; up to pytest 8.3 by a generator.
_UNHEARD = {
    "threadexception": "thread_exception_runtest_hook",
    "unraisableexception": "unraisable_exception_runtest_hook",
}

_line: tuple[pytest.Config, Callable[[bytes], None]] | None = None  # to the pytest process
_inherited: list[Any] = []  # captures of the pytest process, never closed in a rank


def remove_plugin_hooks(config: pytest.Config, say: Callable[[bytes], None]) -> None:
    """Remove other plugins' reporting hooks, and detach from the terminal."""
    global _line
    _line = config, say
    for name in _OUTWARD:
        caller = getattr(config.hook, name)
        for implementation in caller.get_hookimpls():
            if implementation.function.__module__ != "distcheck.testing.plugin":
                remove_hook(caller, implementation.plugin)
    # Suspending it would write to the pytest process's output.
    _inherited.append(detach_capture(config))
    sys.breakpointhook = pdb.set_trace = _no_debugger


def _no_debugger(*_: Any, **__: Any) -> None:
    pytest.fail("a rank has no terminal for a debugger; print or log instead", pytrace=True)


def send_subtest_report(report: pytest.TestReport) -> None:
    """Send the report of a subtest at once, because the rank may hang later."""
    if _line is None:
        return
    config, say = _line
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    crash = getattr(report.longrepr, "reprcrash", None)
    failure = None
    if report.failed:
        failure = RankReport(
            end="failed",
            message=crash.message if crash is not None else str(report.longrepr),
            where=f"{crash.path}:{crash.lineno}" if crash is not None else "",
        )
    say(
        encode_message(
            Subtest(name=report.head_line or report.nodeid, report=data, failure=failure)
        )
    )


@contextmanager
def observe_test_threads(item: pytest.Function) -> Iterator[None]:
    """Enable pytest's observation of threads and finalizers per test (up to pytest 8.3)."""
    with ExitStack() as stack:
        for name, generator in _UNHEARD.items():
            plugin: Any = item.config.pluginmanager.getplugin(name)
            if hasattr(plugin, generator):
                stack.enter_context(contextmanager(getattr(plugin, generator))())
        yield


def warn_of_thread_errors(
    item: pytest.Function, error: BaseException | None
) -> BaseException | None:
    """Make pytest warn in this process about exceptions in threads and finalizers. Under `-W
    error`, the warning fails the test; if the test has already failed, it becomes a note.
    """
    __tracebackhide__ = True
    for name, generator in _UNHEARD.items():
        plugin: Any = item.config.pluginmanager.getplugin(name)
        if plugin is None or hasattr(plugin, generator):
            continue
        try:
            plugin.pytest_runtest_call(item)
        except Exception as told:
            if error is None:
                error = told
            else:
                error.add_note(f"also: {told.args[0]}".partition("\n")[0])
    return error
