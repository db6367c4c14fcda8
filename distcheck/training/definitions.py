"""Where an object was defined: what a report, and an annotation beside the code, point at."""

import inspect
from typing import Any


def source_file(target: Any) -> str:
    """The file of an object; empty where that is not known."""
    try:
        return inspect.getsourcefile(_inspectable(target)) or ""
    except TypeError:
        return ""


def source_line(target: Any, *, file: str) -> int:
    """The line of `file` where an object's definition begins; 0 where that is not known, or where
    it was defined in another file.
    """
    try:
        found = _inspectable(target)
        if inspect.getsourcefile(found) != file:
            return 0
        # As getsourcelines() has it, which would also look for the last line.
        return inspect.findsource(inspect.unwrap(found))[1] + 1
    except (TypeError, OSError):
        return 0


def _inspectable(target: Any) -> Any:
    """The function or class itself; of an object its class."""
    target = inspect.unwrap(target) if callable(target) else target
    return target if inspect.isroutine(target) or inspect.isclass(target) else type(target)
