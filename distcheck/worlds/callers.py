"""Whose code a file is: that under test, or of torch, distcheck or Python itself."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_GROUPS = tuple(_PACKAGE + room + os.sep for room in ("worlds", "backends"))
_PYTHONS = os.path.dirname(os.__file__) + os.sep
# Files between the caller of an operation and the process group: torch's own, and what wraps them.
ON_THE_WAY = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py", "torch/overrides.py",
)  # fmt: skip
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


@cache
def is_installed(file: str) -> bool:
    return bool({*PACKAGES} & {*Path(file).parts})


def line_of_script() -> str:
    """The innermost line of the code under test, as FILE:LINE; nothing where that is a package's,
    which calls for a script.
    """
    place = place_of_caller()
    return "" if is_installed(place) else place


def place_of_caller() -> str:
    """The innermost line of the code under test, as FILE:LINE; or nothing."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_theirs(frame.f_code.co_filename) and os.sep in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_call() -> str:
    """The line of the code under test that makes a call to a process group itself, as FILE:LINE;
    nothing where code of torch's does.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(_GROUPS) or file.endswith(ON_THE_WAY) or is_pythons(file)):
            here = is_theirs(file) and os.sep in file
            return f"{file}:{frame.f_lineno}" if here else ""
        frame = frame.f_back
    return ""
