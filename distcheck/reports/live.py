"""Displays the progress of a verification: a changing line on a terminal; elsewhere, one line per
judged case, so that a CI log shows how far the run is.
"""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.status import Status
from rich.text import Text

from distcheck.errors.shown_text import displayable, one_line, without_workflow_commands
from distcheck.records import Case

_QUIET_S = 30.0  # maximum interval of lines outside a terminal


class LiveProgress:
    """Context manager that displays progress. A `quiet` console shows nothing. `cost` returns the
    relative work of a case.
    """

    def __init__(
        self, console: Console, *, cost: Callable[[Case], float] = lambda case: 1.0
    ) -> None:
        self._console, self._cost = console, cost
        self._status: Status | None = None
        self._begun = self._written = time.monotonic()
        self._cases: list[Case] = []
        self._done: set[str] = set()
        self._before = 0  # cases that an earlier start of this run has judged
        self._planned_at = self._begun
        self._text = "starting"
        self._parts = (0, 0)  # of work without cases: done, and in all

    def __enter__(self) -> "LiveProgress":
        if self._console.is_terminal:
            self._status = self._console.status(self)
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __rich__(self) -> Text:
        """Return the current line. Its seconds advance continuously."""
        return Text(self._format_line(self._text), overflow="ellipsis", no_wrap=True)

    def preparing(self, what: str) -> None:
        """Show work that precedes all cases, or that belongs to a search."""
        self._show(what)

    def phase(self, what: str) -> None:
        """Start another phase with its own line."""
        self._text = what
        self._write(what)

    def counted(self, done: int, total: int, what: str) -> None:
        """Show the progress of work that does not consist of cases."""
        if not self._parts[1]:
            self._planned_at = time.monotonic()
        self._parts = (done, total)
        self._show(what)

    def planned(self, cases: Sequence[Case], *, before: int = 0) -> None:
        """Set the cases to run. `before` cases were judged before the run was restarted."""
        self._cases, self._before = list(cases), before
        self._planned_at = time.monotonic()
        judged = f"; {before} were judged before a restart" if before else ""
        self._write(f"starting the first case{judged}")

    def progress(self, case: Case, what: str) -> None:
        self._show(f"{case.id}: {what}")

    def finished(self, case: Case, verdict: str) -> None:
        """Record a judged case. A case that is run again counts once."""
        self._done.add(case.id)
        beside = self._cases and all(case.id != planned.id for planned in self._cases)
        text = f"{'inspecting failures, ' * bool(beside)}{case.id}: {verdict}"
        self._show(text, silently=True)
        self._write(text)

    def _format_line(self, text: str) -> str:
        """Return a text preceded by the number of judged cases, if known, and followed by the
        times.
        """
        done, total = self._parts
        count = f"{done} of {total}, " if total else ""
        if self._cases:
            planned = {case.id for case in self._cases}
            judged = self._before + len(self._done & planned)
            count = f"{judged} of {self._before + len(planned)} cases judged, "
        return f"[{count}{self._times()}] {without_workflow_commands(one_line(displayable(text)))}"

    def _times(self) -> str:
        """Return the elapsed time and, once the speed is known, an estimate of the
        remaining time.
        """
        now = time.monotonic()
        text = f"{_duration(now - self._begun)}"
        costs = {case.id: self._cost(case) for case in self._cases}
        done: float = sum(cost for name, cost in costs.items() if name in self._done)
        left = sum(costs.values()) - done
        if self._parts[1]:
            done, left = self._parts[0], self._parts[1] - self._parts[0]
        if not done or not left:
            return text
        return f"{text}, about {_duration((now - self._planned_at) * left / done)} left"

    def _show(self, text: str, *, silently: bool = False) -> None:
        self._text = text
        if silently or time.monotonic() - self._written < _QUIET_S:
            return
        self._write(text)

    def _write(self, text: str) -> None:
        """Write a line to a log. On a terminal, the changing line is enough."""
        self._written = time.monotonic()
        if self._status is None:
            line = Text(f"progress: {self._format_line(text)}")
            self._console.print(line, soft_wrap=True, highlight=False)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60:02} s"
