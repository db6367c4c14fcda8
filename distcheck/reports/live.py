"""Progress while a verification runs: one line that changes, on a terminal only."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status
from rich.text import Text

from distcheck.records import Case
from distcheck.reports.showing import shown


class LiveProgress:
    """Shows what is going on; a context manager. Elsewhere than on a terminal it is silent."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._cases: list[str] = []
        self._done = 0
        self._begun = time.monotonic()

    def __enter__(self) -> "LiveProgress":
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def preparing(self, what: str) -> None:
        """Before any case runs."""
        self._show(what)

    def planned(self, cases: Sequence[Case]) -> None:
        """Every case that will run."""
        self._cases = [case.id for case in cases]

    def progress(self, case: Case, what: str) -> None:
        """A case moved on."""
        self._show(f"[{self._done}/{len(self._cases)} cases] {case.id}: {what}")

    def finished(self, case: Case) -> None:
        """A case has been judged."""
        self._done += 1
        self._show(f"[{self._done}/{len(self._cases)} cases] {case.id}: judged")

    def _show(self, text: str) -> None:
        if self._status is not None:
            spent = time.monotonic() - self._begun
            self._status.update(Text(f"{shown(text)} ({spent:.0f} s)"))
