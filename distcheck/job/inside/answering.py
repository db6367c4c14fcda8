"""What a rank says of itself while its job runs: that it goes on, and, when it is asked, where it
is.

A thread waits for the question at a named pipe; a rank that hangs in a collective answers, too.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from distcheck import private
from distcheck.job.inside.rank import world_of
from distcheck.job.settings import Answer
from distcheck.worlds import flight

_EVERY_S = 0.1  # between two notes that a rank goes on


class Answering:
    """One for each process of a job that has imported torch."""

    def __init__(self, folder: Path, step: Callable[[], int]) -> None:
        self._folder, self._step = folder, step
        self._main = threading.get_ident()
        self._beats, self._last = 0, 0.0
        self._file = os.open(
            folder / f"beat-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        with contextlib.suppress(OSError):  # no named pipes: it cannot be asked
            os.mkfifo(folder / f"ask-{os.getpid()}", 0o600)
            threading.Thread(target=self._answer, daemon=True).start()

    def beat(self) -> None:
        """Something was heard of the script."""
        now = time.monotonic()
        if now - self._last >= _EVERY_S:
            self._last, self._beats = now, self._beats + 1
            os.pwrite(self._file, self._beats.to_bytes(8, "little"), 0)

    def _answer(self) -> None:
        """Waits to be asked, again and again, until the folder is gone."""
        name = str(os.getpid())
        while True:
            try:
                with (self._folder / f"ask-{name}").open("rb") as asked:
                    asked.read()
                data = msgspec.json.encode(self._about())
                private.write(self._folder / f"answer-{name}", data)
            except OSError:
                return

    def _about(self) -> Answer:
        frame = sys._current_frames().get(self._main)
        own = str(Path(__file__).parents[1])
        stack = [line for line in traceback.format_stack(frame) if own not in line]
        rank, world = world_of()
        return Answer(
            rank=rank, world=world, step=self._step(), stack="".join(stack[-12:]),
            collectives=flight.latest(),
        )  # fmt: skip
