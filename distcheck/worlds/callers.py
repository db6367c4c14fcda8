"""Whose code a file is: that under test, or of torch, distcheck or Python itself."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PYTHONS = os.path.dirname(os.__file__) + os.sep
PACKAGES = ("site-packages", "dist-packages")  # folders in Python's own that hold others' code


@cache
def is_theirs(file: str) -> bool:
    """Whether a file is of the code under test: neither of torch, distcheck nor Python itself."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folder = os.path.dirname(torch) + os.sep if torch else _PACKAGE
    return not file.startswith((_PACKAGE, folder, "<frozen", "<string>")) and not is_pythons(file)


@cache
def is_pythons(file: str) -> bool:
    """Whether a file is of Python's own modules."""
    inner = file.removeprefix(_PYTHONS)
    return inner != file and not inner.startswith(PACKAGES)


def place_of_caller() -> str:
    """The innermost line of the code under test, as FILE:LINE; or nothing."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_theirs(frame.f_code.co_filename) and os.sep in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
