"""From which lines a script calls what is heard of it, in one step."""

from distcheck.recordings.jobs.records import MOST_LINES
from distcheck.worlds.callers import line_of_script


class LinesHeard:
    """By the kinds of `recordings.jobs.records.LINES`, each line once."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[str, None]] = {}

    def note(self, kind: str) -> None:
        """The script calls something now."""
        lines = self._heard.setdefault(kind, {})
        if len(lines) < MOST_LINES:
            lines[line_of_script()] = None

    def taken(self) -> dict[str, tuple[str, ...]]:
        """All of them, in the order in which they were first called from."""
        return {kind: tuple(lines) for kind, lines in self._heard.items()}
