"""The store at which the ranks of a simulated world meet: a dictionary, in which ranks give way
while they wait.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distcheck.backends.simulated.world import SimulatedWorld


class SimulatedStore(Store):
    """One rank's view of what the ranks have stored."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__()
        self._world = world
        world.stores.append(self)  # torch keeps its half in C++ alone, which then finds no method

    def set(self, key: str, value: Any) -> None:
        """Stores a value."""
        self._world.stored[key] = _as_bytes(value)
        self._world.wake_store()

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        self._world.wait_for_store([key])
        return self._world.stored[key]

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0; returns the sum."""
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
        found: bytes = self._world.stored.get(key, expected)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; other ranks run first."""
        if not all(key in self._world.stored for key in keys):
            self._world.baton.give_way()
        return all(key in self._world.stored for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Gives way until all keys are there."""
        self._world.wait_for_store(keys)

    def delete_key(self, key: str) -> bool:
        """Removes a value; returns whether it was there."""
        return self._world.stored.pop(key, None) is not None

    def num_keys(self) -> int:
        """The number of values."""
        return len(self._world.stored)

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set are there."""
        return False


def _as_bytes(value: Any) -> bytes:
    found: bytes = value.encode() if isinstance(value, str) else bytes(value)
    return found
