"""Reading JSON that a file holds, whatever has become of it."""

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
MOST_BYTES = 256 << 20  # of one file


def read_bounded(path: Path, most: int | None = None) -> bytes:
    """The content of a file. Raises msgspec.DecodeError for one of more than `most` bytes (by
    default `MOST_BYTES`), such as /dev/zero, and OSError.
    """
    most = MOST_BYTES if most is None else most
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise msgspec.DecodeError(f"it is larger than {most >> 20} MiB")
    return data


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decodes `data` as `kind`. Raises msgspec.DecodeError for all that it is not, bytes that are
    not UTF-8 and very deep nesting included.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from error
