"""Classifies source files: code under test, torch, distcheck, or Python itself."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_GROUPS = tuple(_PACKAGE + room + os.sep for room in ("worlds", "backends", "addons"))
_HOOKS = os.path.join(_PACKAGE, "job", "inside", "hooks.py")
_PYTHONS = os.path.dirname(os.__file__) + os.sep
# Files between the caller of an operation and the process group: torch's own wrappers.
ON_THE_WAY = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py", "torch/overrides.py",
)  # fmt: skip
PACKAGES = ("site-packages", "dist-packages")  # third-party folders inside Python's own


@cache
def is_tested_code(file: str) -> bool:
    """Return True if a file is code under test: not torch, distcheck or Python itself."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folder = os.path.dirname(torch) + os.sep if torch else _PACKAGE
    return not file.startswith(
        (_PACKAGE, folder, "<frozen", "<string>")
    ) and not is_standard_library(file)


@cache
def is_own_code(file: str) -> bool:
    return file.startswith(_PACKAGE)


@cache
def wraps_calls(file: str) -> bool:
    """Return True if a file of distcheck replaces functions of torch, and calls them."""
    return file.startswith((*_GROUPS, _HOOKS))


@cache
def is_standard_library(file: str) -> bool:
    """Return True if a file is one of Python's own modules."""
    inner = file.removeprefix(_PYTHONS)
    return inner != file and not inner.startswith(PACKAGES)


@cache
def is_installed(file: str) -> bool:
    return bool({*PACKAGES} & {*Path(file).parts})


def line_of_script() -> str:
    """Return the innermost line of the code under test as FILE:LINE. Return an empty string if that
    line belongs to an installed package, which a script calls.
    """
    place = place_of_caller()
    return "" if is_installed(place) else place


def place_of_caller() -> str:
    """Return the innermost line of the code under test as FILE:LINE, or an empty string."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_tested_code(frame.f_code.co_filename) and os.sep in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_call() -> str:
    """Return the line of the code under test that calls a process group, as FILE:LINE. Return an
    empty string if torch's own code makes the call.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(_GROUPS) or file.endswith(ON_THE_WAY) or is_standard_library(file)):
            here = is_tested_code(file) and os.sep in file
            return f"{file}:{frame.f_lineno}" if here else ""
        frame = frame.f_back
    return ""
