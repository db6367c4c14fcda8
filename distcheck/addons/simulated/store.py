"""The rendezvous store of a simulated world: a dictionary; ranks yield while they wait for keys."""

import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distcheck.addons.simulated.world import SimulatedWorld
from distcheck.worlds.callers import is_theirs

_USUAL_LIMIT: timedelta = Store().timeout  # type: ignore[attr-defined]


class SimulatedStore(Store):
    """One rank's view of the stored values."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__()
        self._world = world
        world.stores.append(self)  # torch itself keeps only the C++ half alive

    def set(self, key: str, value: Any) -> None:
        self._world.stored[key] = _as_bytes(value)
        self._world.wake_store()

    def get(self, key: str) -> bytes:
        """Return a value, once it is set."""
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        self._world.wait_for_store(
            [key], limit.total_seconds() if limit < _USUAL_LIMIT else math.inf
        )
        return self._world.stored[key]

    def append(self, key: str, value: Any) -> None:
        self.set(key, self._world.stored.get(key, b"") + _as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all are set."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, initially 0, and return the sum. Adding 0 polls it."""
        if not amount:
            self._world.scheduler.give_way()
        total = int(self._world.stored.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Store `desired` if the current value is `expected`, or if there is none and `expected` is
        empty; return the value stored afterwards.
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
        """Return True if all keys are set; other ranks run first."""
        if not all(key in self._world.stored for key in keys):
            self._world.scheduler.give_way()
        return all(key in self._world.stored for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Yield until all keys are set. torch's own code waits again after its timeouts."""
        limit_s = math.inf
        if timeout is not None and is_theirs(sys._getframe(1).f_code.co_filename):
            limit_s = timeout.total_seconds()
        self._world.wait_for_store(keys, limit_s)

    def delete_key(self, key: str) -> bool:
        """Remove a value; return True if it was set."""
        return self._world.stored.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815 (what torch's other stores call)

    def num_keys(self) -> int:
        """Return the number of values; other ranks run first."""
        self._world.scheduler.give_way()
        return len(self._world.stored)

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are implemented."""
        return True


def _as_bytes(value: Any) -> bytes:
    found: bytes = value.encode() if isinstance(value, str) else bytes(value)
    return found
