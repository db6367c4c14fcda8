"""A limit that pytest-timeout has set for a test, and that a world keeps by itself.

Its method "thread" ends the pytest process when the time is up, with stacks of that process alone.
A world that ends itself a moment before tells what its ranks were doing, and the session goes on.
"""

import time
from dataclasses import dataclass
from typing import Any

import pytest

_MOST_EARLY_S = 1.0
_EARLY_SHARE = 0.1  # of the limit


@dataclass(frozen=True, kw_only=True)
class Limit:
    """`seconds` for a test; a world of its ends when the monotonic clock shows `ends_at`."""

    seconds: float
    ends_at: float


_KEY = pytest.StashKey[Limit | None]()


def note(item: pytest.Item, settings: Any) -> None:
    """Notes what pytest-timeout is about to set. Its method "signal" raises where a world is waited
    for, which needs no help.
    """
    item.stash[_KEY] = None
    if settings.method == "thread":
        early_s = min(_MOST_EARLY_S, _EARLY_SHARE * settings.timeout)
        ends_at = time.monotonic() + settings.timeout - early_s
        item.stash[_KEY] = Limit(seconds=settings.timeout, ends_at=ends_at)


def check(item: pytest.Item) -> None:
    """Fails the test, once and as the method "signal" would, where its time is nearly up. The
    thread that waits for that is let go: ranks take their time to answer and to end.
    """
    limit = item.stash.get(_KEY, None)
    if limit is not None and time.monotonic() >= limit.ends_at:
        item.stash[_KEY] = None
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        pytest.fail(f"Timeout (>{limit.seconds}s) from pytest-timeout.")
