"""Reads JSON files and Python sources of any origin, with limits; never runs their code."""

import ast
import errno
import os
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from distcheck.errors import UsageError

MOST = 2**63 - 1
Int = Annotated[int, Meta(ge=-MOST - 1, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
# Lists of a world's ranks and steps have these sizes. Heuristic: beyond practical use.
World = Annotated[int, Meta(ge=1, le=1 << 16)]
Steps = Annotated[int, Meta(ge=0, le=1 << 20)]


T = TypeVar("T")
# Heuristic: a report has about 30 kB and 1,000 values per case, and no known matrix has 2,000
# cases. Each value is an object in memory, of up to 200 bytes.
MOST_BYTES = 64 << 20  # of one file
MOST_VALUES = 2_000_000  # in one JSON text


def read_bounded(path: Path, most: int | None = None) -> bytes:
    """Return the content of a file or pipe. Raises msgspec.DecodeError for a device and for more
    than `most` bytes (default `MOST_BYTES`). Raises OSError.
    """
    most = MOST_BYTES if most is None else most
    with open(path, "rb", opener=_open_nonblocking) as file:
        data = file.read(most + 1) or b""  # None for a /proc file without data yet
    if len(data) > most:
        raise msgspec.DecodeError(f"it is larger than {most >> 20} MiB")
    return data


def read_or_none(path: Path, kind: type[T], most: int | None = None) -> T | None:
    """Return the parsed content of a file, or None if it cannot be read or parsed."""
    try:
        return decode_json(read_bounded(path, most), kind)
    except (OSError, msgspec.MsgspecError):
        return None


def read_distcheck_document(
    path: Path, kind: type[T], *, schema: str, name: str, why: str, most: int | None = None
) -> T:
    """Read a document that distcheck wrote, and check its `schema`. The file may have any origin.

    `name` is the file's name. `why`, with {error}, is the message for a file that is not such a
    document. Raises UsageError.
    """
    try:
        found: Any = decode_json(read_bounded(path, most), kind)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{name} {why.format(error=error)}") from error
    if found.schema != schema:
        raise UsageError(f"{name} has the schema {found.schema!r}; this version reads {schema!r}")
    read: T = found
    return read


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking; a pipe without a writer is empty."""
    found = os.open(path, flags | os.O_NONBLOCK)
    about = os.fstat(found)
    mode = about.st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        os.close(found)
        raise msgspec.DecodeError("it is a device, not a file")
    # Another user's pipe may be held open forever.
    os.set_blocking(found, stat.S_ISFIFO(mode) and about.st_uid in (os.geteuid(), 0))
    return found


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode `data` as `kind`. Raises msgspec.DecodeError for invalid data, including invalid
    UTF-8, very deep nesting and more than `MOST_VALUES` values.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:  # or commas in its texts
        raise msgspec.DecodeError(f"it has more than {MOST_VALUES:,} values")
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from error


MOST_SOURCE_BYTES = 16 << 20  # of one file. Heuristic: generated modules of libraries take a few


def read_source(path: Path) -> bytes:
    """Return the content of a file. Raises OSError, also for devices and too large files."""
    try:
        return read_bounded(path, MOST_SOURCE_BYTES)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: an invalid file name
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path)) from error


def parse_source(source: bytes | Path) -> ast.Module:
    """Parse source code, given as bytes or as a file. Raises OSError. Raises SyntaxError for
    anything that Python cannot parse, including very deep nesting.
    """
    content = read_source(source) if isinstance(source, Path) else source
    try:
        return ast.parse(content)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from error
