"""Processes that fork ranks and single-process jobs: the helper, and further interpreters for a
rerun.

There are two further interpreters, for any world size. Each imports torch, which takes about two
seconds of CPU time. They start one after another, so that they do not slow down the helper on two
cores, and live as long as the pool.
"""

import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distcheck.machine.resources import available_bytes, cores
from distcheck.worlds import messages
from distcheck.worlds.local.forking import Forker, LocalShare
from distcheck.worlds.local.helper_process import (
    NO_TORCH_IN_TIME,
    START_DEADLINE_S,
    CleanHelper,
    HelperProcess,
)
from distcheck.worlds.shares import RankStart, Share, Shared, descriptors_of
from distcheck.worlds.surroundings import HASH_SEEDS

_NEEDED_BYTES = 1 << 30  # per interpreter: 0.4 GiB for torch, the rest for its ranks


class Interpreter(Forker):
    """A further interpreter. If it fails to start, a rerun is possible without it."""

    def _helper_died(self) -> None:
        self.let_go()
        if self._ready is not None:
            super()._helper_died()
        self._ready = messages.Ready("", self._helper.last_words() or "it exited")


class Interpreters:
    """Starts further interpreters one after another. `advance` must be called regularly."""

    def __init__(self, selector: selectors.BaseSelector, imports: dict[str, None]) -> None:
        self._made = [
            Interpreter(
                CleanHelper(hash_seed=seed, variant=number), selector=selector, imports=imports
            )
            for number, seed in enumerate(HASH_SEEDS, start=1)
        ]
        self._started = 0
        self._since = time.monotonic()
        self.error = ""

    def __getitem__(self, number: int) -> Forker:
        return self._made[number]

    @property
    def usable(self) -> bool:
        return not self.error and all(one.usable for one in self._made)

    @property
    def ready(self) -> bool:
        started = self._started == len(self._made)
        return started and not self.error and not any(one.importing for one in self._made)

    def advance(self, *, others_importing: int) -> None:
        """Start as many interpreters as there are free cores. If one fails to start, record its
        error.
        """
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
        """Raise HelperError if one of them is stopped."""
        for one in self._made[: self._started]:
            one.look_at_helper()

    def let_go(self) -> None:
        for one in self._made:
            one.let_go()

    def close(self) -> None:
        self.let_go()
        for one in self._made:
            one.close()


class Pool(Forker):
    """A helper process and its children, and further interpreters once `open_interpreters` was
    called.
    """

    def __init__(self, helper: HelperProcess | None = None) -> None:
        super().__init__(helper or CleanHelper())
        self._interpreters: Interpreters | None = None

    def why_no_interpreters(self) -> str:
        """Return the reason why ranks cannot be forked from further interpreters; empty if they
        can.
        """
        if self._interpreters is None or not self._interpreters.error:
            return ""
        return f"a further interpreter could not be started: {self._interpreters.error}"

    def open_interpreters(self) -> None:
        """Start the further interpreters for `start_ranks`, without waiting for their imports."""
        if self._interpreters is not None:
            if self._interpreters.usable:
                return
            self._interpreters.close()
        self.open()
        self._interpreters = Interpreters(self._selector, self._imports)
        self._interpreters.advance(others_importing=int(self.importing))

    @property
    def interpreters_ready(self) -> bool:
        """True if ranks can be forked from the further interpreters."""
        return self._interpreters is not None and self._interpreters.ready

    def place_of(self, interpreter: int | None) -> Forker:
        """Return the forker of a further interpreter; for None, that of the helper."""
        if interpreter is None:
            return self
        assert self._interpreters is not None, "open_interpreters comes first"
        return self._interpreters[interpreter]

    @property
    def forks_all(self) -> bool:
        """True if all ranks of a world are forked on this machine, so that they can share a file
        descriptor.
        """
        return True

    @property
    def address(self) -> str:
        """Address of this machine at which every rank can reach it."""
        return "127.0.0.1"

    def share_data(self, name: str, data_dir: str, *, download: bool) -> dict[str, bytes]:
        """Make the processes on other machines read the data set. Return their results by name."""
        return {}

    def ranks_here(self, world: int) -> int:
        return world

    def describe(self) -> dict[str, Any]:
        """Describe for a report how ranks are launched; empty if they are simply forked here."""
        return {}

    def start_ranks(
        self,
        target: str,
        starts: Sequence[RankStart],
        fds: Mapping[str, Shared],
        *,
        together: bool = False,
    ) -> list[Share]:
        """Start the ranks of a world, in one share for each place that runs some of them. With
        `together`, all ranks are in one share, because they belong to an MPI job started here.
        """
        starts_here = dict(enumerate(starts))
        return [LocalShare(self, target=target, starts=starts_here, fds=descriptors_of(fds))]

    def pump(self, timeout_s: float) -> None:
        super().pump(timeout_s)
        if self._interpreters is not None:
            self._interpreters.advance(others_importing=int(self.importing))

    def look_at_helper(self) -> None:
        """Raise HelperError if the helper, or a further interpreter, is stopped."""
        super().look_at_helper()
        if self._interpreters is not None and not self._closed:
            self._interpreters.look()

    def let_go(self) -> None:
        if self._interpreters is not None:
            self._interpreters.let_go()
        super().let_go()

    def _end(self) -> None:
        if self._interpreters is not None:
            self._interpreters.close()
        super()._end()
