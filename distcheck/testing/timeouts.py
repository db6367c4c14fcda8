"""Enforces the limit of pytest-timeout for a test in a world.

With its method "thread", pytest-timeout ends the pytest process at the limit and shows the stacks
of that process only. A world that ends slightly earlier reports the stacks of its ranks, and the
session continues. With either method, the limit applies to all Hypothesis examples of a test
together.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from distcheck.testing import examples

_MOST_EARLY_S = 1.0
_EARLY_SHARE = 0.1  # of the limit


@dataclass(kw_only=True)
class TimeLimit:
    """A limit of `seconds`, until the monotonic clock shows `ends_at`. `is_ours`: the world must
    enforce it, and has not `struck` yet. `held_back`: a debugger suspends it.
    """

    seconds: float
    ends_at: float
    is_ours: bool
    held_back: bool
    struck: bool = False

    @property
    def text(self) -> str:
        return f"Timeout (>{self.seconds}s) from pytest-timeout."


_KEY = pytest.StashKey[TimeLimit | None]()


def record_time_limit(item: pytest.Item, settings: Any) -> None:
    """Record the limit that pytest-timeout is about to set. Its method "signal" needs no handling:
    it raises an exception while the pytest process waits for a world.
    """
    is_ours = settings.method == "thread"
    early_s = min(_MOST_EARLY_S, _EARLY_SHARE * settings.timeout) if is_ours else 0.0
    item.stash[_KEY] = TimeLimit(
        seconds=settings.timeout,
        ends_at=time.monotonic() + settings.timeout - early_s,
        is_ours=is_ours,
        held_back=not getattr(settings, "disable_debugger_detection", False),  # since 2.2
    )


def fail_if_time_is_up(item: pytest.Item) -> None:
    """Fail the test once, like the method "signal", if its time is nearly up."""
    limit = item.stash.get(_KEY, None)
    if limit is not None and limit.is_ours and not limit.struck and _is_up(item, limit):
        limit.struck = True
        pytest.fail(limit.text)


def _is_up(item: pytest.Item, limit: TimeLimit) -> bool:
    """Return True if the time is up, and cancel pytest-timeout's timer: ranks need time to end."""
    if time.monotonic() < limit.ends_at or (limit.held_back and _is_debugging()):
        return False
    item.config.hook.pytest_timeout_cancel_timer(item=item)
    return True


def _is_debugging() -> bool:
    """Return True if pytest-timeout assumes that a debugger is in use."""
    timeouts: Any = sys.modules.get("pytest_timeout")
    return timeouts is not None and timeouts.is_debugging()


class _TimeIsUp(BaseException):
    """Ends Hypothesis' search, which would catch any Exception, and pytest's failures."""


class ExampleSearch:
    """Hypothesis examples of a test. When the time is up, no further example is tried: otherwise
    the examples that shrink and reproduce a failure would be unlimited.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._found: BaseException | None = None
        self._before: list[str] = []

    @contextmanager
    def example(self, arguments: Mapping[str, object]) -> Iterator[None]:
        """Run one example. If it fails when time is up, its error becomes the test's."""
        __tracebackhide__ = True
        limit = self._item.stash.get(_KEY, None)
        if limit is None:
            yield
            return
        if self._found is None and _is_up(self._item, limit):
            text = "\n".join([limit.text, *self._before])
            self._found = pytest.fail.Exception(text, pytrace=False)
        if self._found is not None:
            raise _TimeIsUp
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            if examples.is_rejection(failure):
                raise
            shown = f"the example {examples.example_arguments_text(arguments)}"
            if not _is_up(self._item, limit):
                self._before = [f"Before, {shown} had failed:\n{failure}"]
                raise
            late = (
                [] if limit.text in str(failure) else [f"{limit.text} No other example is tried."]
            )
            for text in (*late, f"In {shown}", *self._before):
                failure.add_note(text)
            self._found = failure
            raise _TimeIsUp from None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run all examples. Raises the single failure of a test whose time was up."""
        __tracebackhide__ = True
        limit = self._item.stash.get(_KEY, None)
        try:
            yield
        except BaseException as raised:
            if self._found is None:
                if limit is not None and str(raised) == limit.text:  # between two examples
                    for text in self._before:
                        raised.add_note(text)
                raise
        finally:
            self._item.stash[_KEY] = None  # a second run of the test has none
        if self._found is not None:
            raise self._found from None
