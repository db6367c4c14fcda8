"""Recognizes defects of distcheck itself, and saves their tracebacks.

An exception is a defect of distcheck if it is not a message for the user, and every frame of its
traceback is in distcheck, the standard library, or a library that distcheck calls. An error of the
machine (memory, files) is not a defect.
"""

import builtins
import contextlib
import os
import re
import sysconfig
import time
from pathlib import Path

from distcheck import private
from distcheck.errors.masking import masked

FOLDER = Path(private.FOLDER, "defects")
OWN_CODE = str(Path(__file__).parents[1])
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
# Libraries that distcheck calls itself; other code belongs to the user.
_LIBRARIES = (
    "torch", "torchvision", "numpy", "msgspec", "safetensors", "psutil", "xxhash", "click", "rich",
    "jinja2", "markupsafe", "hypothesis", "mpi4py",
)  # fmt: skip
_MACHINE = (OSError, MemoryError, RecursionError)
# Errors of programs. Libraries report peers, devices and networks by RuntimeError and by classes of
# their own.
_OF_PROGRAMS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, NotImplementedError,
    StopIteration, TypeError, ValueError,
)  # fmt: skip
_OF_MESSAGES = ("DecodeError", "ValidationError")  # of msgspec
_MOST_CHARACTERS = 100_000


def is_defect(kind: str, traceback: str) -> bool:
    """Return True if an exception of class `kind` with this traceback is a defect of distcheck."""
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, _MACHINE):
        return False
    if kind == "OutOfMemoryError":  # of torch
        return False
    files = [file for file, _, _ in _FRAME.findall(traceback)]
    own = [file for file in files if _is_below(file, OWN_CODE)]
    return bool(own) and all(file in own or _is_library(file) for file in files)


def is_programming_error(kind: str) -> bool:
    """Return True if only programming errors raise this class of exceptions: not a lost peer, a
    device or a network.
    """
    found = getattr(builtins, kind, None)
    return kind in _OF_MESSAGES or (isinstance(found, type) and issubclass(found, _OF_PROGRAMS))


def innermost_own_place(traceback: str) -> str:
    """Return the innermost frame in distcheck's code, such as
    `distcheck/judge/job.py:61 in judge`.
    """
    own = [found for found in _FRAME.findall(traceback) if _is_below(found[0], OWN_CODE)]
    if not own:
        return "an unknown place"
    file, line, function = own[-1]
    return f"distcheck/{os.path.relpath(file, OWN_CODE)}:{line} in {function}"


def save_traceback(text: str) -> str:
    """Save a traceback with secrets masked. Return the path, or "" if it could not be saved."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    content = masked(text)[-_MOST_CHARACTERS:]
    # The working folder may be read-only, or its .distcheck another user's.
    temporary = private.temporary_folder()
    elsewhere = temporary and temporary / private.unique("distcheck-defect-")
    for place in filter(None, (FOLDER, elsewhere)):
        with contextlib.suppress(OSError):
            private.write(private.folder(place) / name, content)
            return str(place / name)
    return ""


def _is_below(file: str, folder: str) -> bool:
    return file.startswith(folder + os.sep)


def _is_library(file: str) -> bool:
    if file.startswith("<"):  # generated code: of a frozen module, or of a dataclass
        return True
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    for folder in packages:
        if _is_below(file, folder):
            return os.path.relpath(file, folder).split(os.sep)[0] in _LIBRARIES
    return any(_is_below(file, folder) for folder in places)
