"""Further interpreters, from which the ranks of a rerun are forked: each with torch of its own.

Two, whatever the world: each imports torch, for about two seconds of a core. They are started one
after another, so that on two cores the helper is not slowed down, and kept as long as the pool.
"""

import selectors
import time
from typing import Protocol

from distcheck.machine.cores import cores
from distcheck.machine.free_memory import available_bytes
from distcheck.worlds import messages
from distcheck.worlds.local.helper_process import (
    NO_TORCH_IN_TIME,
    START_DEADLINE_S,
    HelperProcess,
)
from distcheck.worlds.pool import Pool
from distcheck.worlds.surroundings import HASH_SEEDS

_NEEDED_BYTES = 1 << 30  # 0.4 of it for torch; the rest is for the ranks


class MakesHelpers(Protocol):
    """Makes the process that an interpreter is."""

    def __call__(self, *, hash_seed: int, variant: int) -> HelperProcess:
        """One that differs from the others by both numbers."""
        ...


class Interpreter(Pool):
    """A pool that forks from a further interpreter. That it could not be started fails nothing: a
    rerun is possible without it.
    """

    def _helper_died(self) -> None:
        if self._ready is None:
            self._ready = messages.Ready("", self._helper.last_words() or "it ended")
            self.let_go()
            return
        self.let_go()
        super()._helper_died()


class Interpreters:
    """Starts them in turn; `advance` has to be called now and then."""

    def __init__(
        self, make: MakesHelpers, selector: selectors.BaseSelector, imports: dict[str, None]
    ) -> None:
        self._made = [
            Interpreter(make(hash_seed=seed, variant=number), selector=selector, imports=imports)
            for number, seed in enumerate(HASH_SEEDS, start=1)
        ]
        self._started = 0
        self._since = time.monotonic()
        self.error = ""

    def __getitem__(self, number: int) -> Pool:
        return self._made[number]

    @property
    def usable(self) -> bool:
        """Whether ranks can be, or will be, forked from them."""
        return not self.error and all(one.usable for one in self._made)

    @property
    def ready(self) -> bool:
        """Whether all have imported torch."""
        started = self._started == len(self._made)
        return started and not self.error and not any(one.importing for one in self._made)

    def advance(self, *, others_importing: int) -> None:
        """Starts as many as there are cores for; notes one that could not be made ready."""
        if self.error or self.ready:
            return
        importing = others_importing + sum(one.importing for one in self._made)
        while self._started < len(self._made) and importing < cores():
            if (available := available_bytes()) < _NEEDED_BYTES:
                self.error = f"it needs 1.0 GiB of memory and {available / 2**30:.1f} are available"
                break
            try:
                self._made[self._started].open()
            except OSError as error:
                self.error = str(error.strerror)
                break
            self._started += 1
            importing += 1
        errors = [self.error, *(one.start_error for one in self._made)]
        self.error = next(filter(None, errors), "")
        if not self.error and time.monotonic() - self._since > START_DEADLINE_S:
            self.error = NO_TORCH_IN_TIME
        if self.error:
            self.close()

    def look(self) -> None:
        """Raises HelperError where one of them is stopped."""
        for one in self._made[: self._started]:
            one.look_at_helper()

    def let_go(self) -> None:
        """Tells them to end."""
        for one in self._made:
            one.let_go()

    def close(self) -> None:
        """Ends them, all at once."""
        self.let_go()
        for one in self._made:
            one.close()
