"""Reading Python sources of others, whatever is in them; nothing of them is run."""

import ast
import errno
import os
from pathlib import Path

import msgspec

from distcheck.records.decoding import read_bounded

MOST_BYTES = 16 << 20  # of one file. Chosen: generated modules of libraries take a few


def read_source(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for a device and a file that is too large."""
    try:
        return read_bounded(path, MOST_BYTES)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: a name that no file can have
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path)) from error


def parse_source(source: bytes | Path) -> ast.Module:
    """The tree of a source, or of the file that holds it. Raises OSError, and SyntaxError for all
    that Python cannot parse, very deep nesting included.
    """
    content = read_source(source) if isinstance(source, Path) else source
    try:
        return ast.parse(content)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from error
