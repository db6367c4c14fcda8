"""What a guard under `distcheck job --guard` leaves for the front: a file of each rank."""

from pathlib import Path

import msgspec

from distcheck.records.decoding import decode_json, read_bounded

_MOST_BYTES = 1 << 20


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard of one optimizer has done so far, in one rank; a file for the front."""

    rank: int
    world: int
    optimizer: str
    steps: int
    checks: int
    checked_at: int = -1
    compared: int
    first: str = ""
    file: str = ""
    remarks: tuple[str, ...] = ()


def read(file: Path) -> Checked:
    """A file again. Raises msgspec.MsgspecError and OSError."""
    return decode_json(read_bounded(file, _MOST_BYTES), Checked)
