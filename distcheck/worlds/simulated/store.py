"""The store at which the ranks of a simulated world meet: a dictionary, in which ranks give way
while they wait.
"""

import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distcheck.worlds.callers import is_theirs
from distcheck.worlds.simulated.world import SimulatedWorld

_USUAL_LIMIT: timedelta = Store().timeout  # type: ignore[attr-defined]


class SimulatedStore(Store):
    """One rank's view of what the ranks have stored."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__()
        self._world = world
        world.stores.append(self)  # torch keeps its half in C++ alone, which then finds no method

    def set(self, key: str, value: Any) -> None:
        self._world.stored[key] = _as_bytes(value)
        self._world.wake_store()

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        self._world.wait_for_store(
            [key], limit.total_seconds() if limit < _USUAL_LIMIT else math.inf
        )
        return self._world.stored[key]

    def append(self, key: str, value: Any) -> None:
        self.set(key, self._world.stored.get(key, b"") + _as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once all are there."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0; returns the sum. Adding 0 asks for it."""
        if not amount:
            self._world.scheduler.give_way()
        total = int(self._world.stored.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Stores `desired` where the value is `expected`, or nothing is expected and there; returns
        what is stored then.
        """
        known = self._world.stored.get(key)
        expected = _as_bytes(expected)
        if known == expected or (known is None and not expected):
            self.set(key, desired)
        else:
            self._world.scheduler.give_way()
        found: bytes = self._world.stored.get(key, expected)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; other ranks run first."""
        if not all(key in self._world.stored for key in keys):
            self._world.scheduler.give_way()
        return all(key in self._world.stored for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Gives way until all keys are there. torch's own code waits again after its limits."""
        limit_s = math.inf
        if timeout is not None and is_theirs(sys._getframe(1).f_code.co_filename):
            limit_s = timeout.total_seconds()
        self._world.wait_for_store(keys, limit_s)

    def delete_key(self, key: str) -> bool:
        """Removes a value; returns whether it was there."""
        return self._world.stored.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815 (what torch's other stores call)

    def num_keys(self) -> int:
        """The number of values; other ranks run first."""
        self._world.scheduler.give_way()
        return len(self._world.stored)

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set are there."""
        return True


def _as_bytes(value: Any) -> bytes:
    found: bytes = value.encode() if isinstance(value, str) else bytes(value)
    return found
