"""Checksums of a saved trace, so that a damaged trace is rejected and never judged.

    checksums.json    digests of about.json and of the index.bin of every run

The index has the digests of the tensors. A trace without this file, or with a different schema, is
rejected, because damage could not be detected. A separate process moves traces between memory and
folders.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from distcheck import private
from distcheck.errors import UsageError
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records.decoding import decode_json, read_bounded
from distcheck.worlds.jobs import Job

SCHEMA = "distcheck.trace/3"
_NAME = "checksums.json"
_ABOUT = "about.json"


class TraceChecksums(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of checksums.json: XXH3 digests of 128 bits, in hexadecimal."""

    schema: str
    about: str
    indexes: tuple[str, ...]


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def write_about(folder: Path, about: bytes, indexes: Sequence[str]) -> None:
    """Write about.json and then the checksums; `indexes` are the digests of the indexes."""
    private.write(folder / _ABOUT, about)
    seal = TraceChecksums(schema=SCHEMA, about=digest(about), indexes=tuple(indexes))
    private.write(folder / _NAME, msgspec.json.encode(seal))


def read_about(folder: Path) -> tuple[bytes, tuple[str, ...]]:
    """Return the content of about.json and the digests of the indexes, one per run. Raises
    UsageError if a file is missing, damaged or of a different schema.
    """
    seal = _read(folder)
    try:
        about = read_bounded(folder / _ABOUT)
    except msgspec.DecodeError as error:
        raise UsageError(_damage(folder, f"{_ABOUT}: {error}")) from error
    except OSError as error:
        raise UsageError(_damage(folder, f"{_ABOUT} cannot be read: {error.strerror}")) from error
    if digest(about) != seal.about:
        raise UsageError(_damage(folder, f"{_ABOUT} does not have the checksum in {_NAME}"))
    runs = {path.name for path in folder.glob("run-*")}
    expected = {f"run-{number}" for number in range(1, len(seal.indexes) + 1)}
    if runs != expected or not expected:
        said = ", ".join(sorted(runs)) or "no run"
        raise UsageError(_damage(folder, f"it has {said} and {len(seal.indexes)} checksums"))
    return about, seal.indexes


def _read(folder: Path) -> TraceChecksums:
    try:
        data = read_bounded(folder / _NAME)
    except msgspec.DecodeError as error:
        raise UsageError(_damage(folder, f"{_NAME}: {error}")) from error
    except FileNotFoundError:
        raise UsageError(
            f"the trace in {folder} has no {_NAME}: an earlier version of distcheck wrote it, or "
            "the file is lost; record the run again"
        ) from None
    except OSError as error:
        raise UsageError(_damage(folder, f"{_NAME} cannot be read: {error.strerror}")) from error
    try:
        schema = decode_json(data, _Schema).schema
        if schema == SCHEMA:
            return decode_json(data, TraceChecksums)
    except msgspec.MsgspecError as error:
        raise UsageError(_damage(folder, f"{_NAME}: {error}")) from error
    raise UsageError(
        f"the trace in {folder} has the schema {schema!r}, and this version reads {SCHEMA!r}; "
        "record the run again with this version"
    )


class _Schema(msgspec.Struct, frozen=True):
    schema: str


def _damage(folder: Path, how: str) -> str:
    return f"the trace in {folder} is damaged: {how}; record the run again"


TRACES = ("trace", "rerun")  # of a case, as they are saved


class TraceFilesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to move traces between shared memory and a folder. SAVE returns the digests of the
    indexes; LOAD requires them in `indexes`. With `tensors` False, only the indexes are moved.
    """

    folder: str
    layout: TraceLayout
    indexes: tuple[str, ...] = ()
    tensors: bool = True


SAVE = Job("distcheck.recordings.traces.files:save_job", TraceFilesRequest, tuple[str, ...], TRACES)
LOAD = Job("distcheck.recordings.traces.files:load_job", TraceFilesRequest, type(None), TRACES)
