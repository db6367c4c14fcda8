"""Reading JSON that a file holds, whatever has become of it, and with a limit to what it takes."""

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
# Lists of a world's ranks, and of its steps, are made of these. Chosen: beyond what people run.
World = Annotated[int, Meta(ge=1, le=1 << 16)]
Steps = Annotated[int, Meta(ge=0, le=1 << 20)]


T = TypeVar("T")
# Chosen: a report takes about 30 kB and 1,000 values for a case, and 2,000 cases are in no matrix
# that people have shown. Each value is an object in memory, of up to 200 bytes.
MOST_BYTES = 64 << 20  # of one file
MOST_VALUES = 2_000_000  # in one JSON text


def read_bounded(path: Path, most: int | None = None) -> bytes:
    """The content of a file, or of a pipe. Raises msgspec.DecodeError for one
    of more than `most` bytes (by default `MOST_BYTES`) and for a device, and OSError.
    """
    most = MOST_BYTES if most is None else most
    with open(path, "rb", opener=_open_at_once) as file:
        data = file.read(most + 1) or b""  # of a file of /proc that waits for its writer, nothing
    if len(data) > most:
        raise msgspec.DecodeError(f"it is larger than {most >> 20} MiB")
    return data


def read_if_whole(path: Path, kind: type[T], most: int | None = None) -> T | None:
    """What a file holds; None where it cannot be read, or holds something else."""
    try:
        return decode_json(read_bounded(path, most), kind)
    except (OSError, msgspec.MsgspecError):
        return None


def read_written(
    path: Path, kind: type[T], *, schema: str, name: str, why: str, most: int | None = None
) -> T:
    """A document that distcheck has written, which its `schema` says, from a file of any origin.
    `name` is what the file is called, and `why` says what another file is not, with {error} in it.
    Raises UsageError.
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


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file; a pipe without a writer is an empty one, which is not waited for."""
    found = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(found).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        os.close(found)
        raise msgspec.DecodeError("it is a device, not a file")
    os.set_blocking(found, stat.S_ISFIFO(mode))
    return found


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decodes `data` as `kind`. Raises msgspec.DecodeError for all that it is not, bytes that are
    not UTF-8, very deep nesting and more than `MOST_VALUES` values included.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:  # or commas in its texts
        raise msgspec.DecodeError(f"it has more than {MOST_VALUES:,} values")
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from error
