"""A limit that pytest-timeout has set for a test, and that a world keeps by itself.

Its method "thread" ends the pytest process when the time is up, with stacks of that process alone.
A world that ends itself a moment before tells what its ranks were doing, and the session goes on.
By either method, the limit is one for all of hypothesis' examples of a test.
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
class Limit:
    """`seconds` for a test, whose time is up when the monotonic clock shows `ends_at`.

    `is_ours`: a world has to end itself, and has not `struck` yet. `held_back`: by a debugger.
    """

    seconds: float
    ends_at: float
    is_ours: bool
    held_back: bool
    struck: bool = False

    @property
    def text(self) -> str:
        return f"Timeout (>{self.seconds}s) from pytest-timeout."


_KEY = pytest.StashKey[Limit | None]()


def note(item: pytest.Item, settings: Any) -> None:
    """Notes what pytest-timeout is about to set. Its method "signal" raises where a world is waited
    for, which needs no help.
    """
    is_ours = settings.method == "thread"
    early_s = min(_MOST_EARLY_S, _EARLY_SHARE * settings.timeout) if is_ours else 0.0
    item.stash[_KEY] = Limit(
        seconds=settings.timeout,
        ends_at=time.monotonic() + settings.timeout - early_s,
        is_ours=is_ours,
        held_back=not getattr(settings, "disable_debugger_detection", False),  # of 2.2
    )


def check(item: pytest.Item) -> None:
    """Fails the test, once and as the method "signal" would, where its time is nearly up."""
    limit = item.stash.get(_KEY, None)
    if limit is not None and limit.is_ours and not limit.struck and _is_up(item, limit):
        limit.struck = True
        pytest.fail(limit.text)


def _is_up(item: pytest.Item, limit: Limit) -> bool:
    """Whether the time is up. Then all others that wait for that are let go: ranks take their time
    to answer and to end.
    """
    if time.monotonic() < limit.ends_at or (limit.held_back and _is_debugging()):
        return False
    item.config.hook.pytest_timeout_cancel_timer(item=item)
    return True


def _is_debugging() -> bool:
    """Whether pytest-timeout takes it that a person is at a debugger, who needs time."""
    timeouts: Any = sys.modules.get("pytest_timeout")
    return timeouts is not None and timeouts.is_debugging()


class _TimeIsUp(BaseException):
    """Ends hypothesis' search, which would catch any Exception, and pytest's failures."""


class ExampleSearch:
    """Hypothesis' examples of a test. When the time is up, no further one is tried: there would be
    nothing to limit the many that shrink a failure, and that show whether it comes again.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._found: BaseException | None = None
        self._before: list[str] = []

    @contextmanager
    def example(self, arguments: Mapping[str, object]) -> Iterator[None]:
        """Around one example. What it raises when the time is up is what the test raises."""
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
            shown = f"the example {examples.shown(arguments)}"
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
        """Around all of them. Raises the one failure of a test whose time was up."""
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
