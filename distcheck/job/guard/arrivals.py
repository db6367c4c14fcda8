"""Which ranks have reached a check: by the job's store, which outlives a rank that ends early."""

import atexit
import contextlib
import time
from typing import Any

_PATIENCE_S = 5.0  # chosen: ranks that go on reach a check about when the first one does


class Arrivals:
    """Notes of each rank, in the guard's own part of the store: the step of its last check, and the
    one that its guard ended after.
    """

    def __init__(self, store: Any, place: int, world: int) -> None:
        self._store, self._place, self._world = store, place, world
        self._last = 0
        atexit.register(self.end)

    def arrive(self, step: int) -> None:
        """This rank has come to the check after a step."""
        self._write("at", step)

    def made(self, steps: int) -> None:
        """How many steps this rank has made; kept until it ends."""
        self._last = steps

    def end(self) -> None:
        """This rank comes to no further check."""
        atexit.unregister(self.end)
        self._write("end", self._last)
        self._store = None

    def _write(self, what: str, step: int) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
                self._store.set(f"{what}/{self._place}", str(step))

    def missing(self, step: int) -> dict[int, str]:
        """Places of ranks that did not come to the check after a step, and what is known of each;
        nothing where the store cannot say.
        """
        until = time.monotonic() + _PATIENCE_S
        while self._store is not None:
            try:
                behind = [place for place in range(self._world) if self._read("at", place) < step]
                ended = {p: at for p in behind if (at := self._read("end", p)) >= 0}
                if ended:
                    return {p: f"its guard ended after step {at}" for p, at in ended.items()}
                if behind and time.monotonic() > until:
                    return {p: _last(self._read("at", p)) for p in behind}
            except RuntimeError:
                return {}
            if time.monotonic() > until:
                return {}
            time.sleep(0.05)
        return {}

    def _read(self, what: str, place: int) -> int:
        """A step, or -1 where nothing was noted."""
        key = f"{what}/{place}"
        if not self._store.check([key]):
            return -1
        said = self._store.get(key)
        return int(said) if said.isdigit() else -1


def _last(step: int) -> str:
    return f"its last check was after step {step}" if step >= 0 else "it came to no check"
