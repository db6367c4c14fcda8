"""Reading JSON that a file holds, whatever has become of it."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decodes `data` as `kind`. Raises msgspec.DecodeError for all that it is not, bytes that are
    not UTF-8 and very deep nesting included.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from error
