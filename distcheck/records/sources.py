"""Reads Python sources of others, whatever their contents, without running them."""

import ast
import errno
import os
from pathlib import Path

import msgspec

from distcheck.records.decoding import read_bounded

MOST_BYTES = 16 << 20  # of one file. Heuristic: generated modules of libraries take a few


def read_source(path: Path) -> bytes:
    """Return the content of a file. Raises OSError, also for a device or a too large file."""
    try:
        return read_bounded(path, MOST_BYTES)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: an invalid file name
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path)) from error


def parse_source(source: bytes | Path) -> ast.Module:
    """Parse a source, or the file that holds it. Raises OSError, and SyntaxError for everything
    that Python cannot parse, including very deep nesting.
    """
    content = read_source(source) if isinstance(source, Path) else source
    try:
        return ast.parse(content)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from error
