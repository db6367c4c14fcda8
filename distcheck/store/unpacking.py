"""Unpacks a zip file of unknown origin into a new folder, and checks every member.

For any archive: nothing is written outside that folder, nothing in it is a link, and compressed
members together write at most `MOST_BYTES`. Stored members take no more space than the archive. An
archive that violates a rule raises UsageError with a one-line message.
"""

import hashlib
import io
import shutil
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from distcheck import private
from distcheck.errors import CannotRunError, UsageError

MOST_BYTES = 256 << 20  # of all compressed members, unpacked
MOST_MEMBERS = 10_000
_MOST_DIRECTORY_BYTES = 4 << 20  # of the central directory, which is read as a whole
_MOST_PARTS = 32
_MOST_NAME_BYTES, _MOST_PART_BYTES = 1000, 255
_COMPILED = "__pycache__"
_CHUNK_BYTES = 1 << 20
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, ValueError, RuntimeError,
    NotImplementedError, OverflowError,
)  # fmt: skip


class _Bounded(io.BufferedReader):
    """A file whose single reads are limited to the maximum size of a central directory."""

    def read(self, size: int | None = -1, /) -> bytes:
        most = _MOST_DIRECTORY_BYTES + 1
        data = super().read(most if size is None or size < 0 else min(size, most))
        if len(data) == most:
            raise zipfile.BadZipFile("its list of members is longer than 4 MiB")
        return data


@contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive and check every member. Raises UsageError."""
    try:
        with _Bounded(open(path, "rb", buffering=0)) as file, zipfile.ZipFile(file) as archive:
            _check_members(path, archive.infolist())
            if sum(member.compress_size for member in archive.infolist()) > path.stat().st_size:
                raise zipfile.BadZipFile("its members overlap")
            yield archive
    except UsageError:
        raise
    except _DAMAGE as error:
        raise UsageError(f"{path} is damaged or is not a bundle of distcheck: {error}") from error


@contextmanager
def unpack_archive(path: Path, archive: zipfile.ZipFile, folder: Path) -> Iterator[Path]:
    """Yield a draft folder with every member of the archive. When the block ends, it becomes
    `folder`.

    If `folder` already has the same files, it is left in place: a different process may be reading
    it. Raises UsageError for a damaged member, CannotRunError if nothing can be written.
    """
    try:
        draft = folder.with_name(private.unique(f".{folder.name[:80]}-"))
        try:
            private.folder(draft, is_new=True)
            _write_members(path, archive, draft)
            yield draft
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise CannotRunError(f"{path} cannot be unpacked to {folder}: {error.strerror}") from error


def _publish(draft: Path, folder: Path) -> None:
    for last in (False, True):
        if not folder.is_symlink() and digests_of_files(folder) == digests_of_files(draft):
            return
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        try:
            draft.replace(folder)
        except OSError:  # another process was first
            if last:
                raise
        else:
            return


def digests_of_files(folder: Path) -> dict[str, bytes]:
    """Return the SHA-256 of a folder's files by relative path, without compiled Python."""
    return {
        file.relative_to(folder).as_posix(): _digest(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and _COMPILED not in file.parts
    }


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _write_members(path: Path, archive: zipfile.ZipFile, folder: Path) -> None:
    left, made = MOST_BYTES, {folder}
    for member in archive.infolist():
        target = folder / member.filename
        place = target if member.is_dir() else target.parent
        if place not in made:  # its check takes time for each of its files
            made.add(private.folder(place))
        if member.is_dir():
            continue
        with archive.open(member) as source, private.new_file(target) as file:
            left -= _copy(path, source, file, left if member.compress_type else None)


def _copy(path: Path, source: IO[bytes], file: IO[bytes], most: int | None) -> int:
    """Copy in pieces; return the bytes counted against the limit. Raises UsageError."""
    written = 0
    while piece := source.read(_CHUNK_BYTES):
        written += len(piece)
        if most is not None and written > most:
            raise UsageError(_too_large(path))
        file.write(piece)
    return written if most is not None else 0


def read_member(path: Path, archive: zipfile.ZipFile, name: str, *, most: int) -> bytes:
    """Return one member, of at most `most` bytes. Raises UsageError if it is missing or larger."""
    if name not in archive.namelist():
        raise UsageError(f"{path} is not a bundle of distcheck: it has no {name}")
    with archive.open(name) as source:
        data = source.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{path} is not a bundle of distcheck: {name} is larger than {most} bytes")
    return data


def _too_large(path: Path) -> str:
    return (
        f"{path} would unpack to more than {MOST_BYTES >> 20} MiB, the limit for the compressed "
        "files of a bundle; it was not unpacked"
    )


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MOST_MEMBERS:
        raise UsageError(f"{path} has {len(members)} members; a bundle has at most {MOST_MEMBERS}")
    for member in members:
        if why := _why_not(member):
            raise UsageError(
                f"{path} is not a bundle of distcheck: member {member.orig_filename!r} {why}"
            )
    files = [PurePosixPath(member.filename) for member in members if not member.is_dir()]
    folders = {folder for file in files for folder in file.parents}
    folders |= {PurePosixPath(member.filename) for member in members if member.is_dir()}
    counts = Counter([*files, *folders])
    for file in files:
        if counts[file] > 1:
            raise UsageError(
                f"{path} is not a bundle of distcheck: member {str(file)!r} is in it more than once"
            )
    if sum(member.file_size for member in members if member.compress_type) > MOST_BYTES:
        raise UsageError(_too_large(path))


def _why_not(member: zipfile.ZipInfo) -> str:
    """Return the reason that a member is refused; empty if it may be unpacked."""
    name = member.orig_filename
    plain = name.rstrip("/") if member.is_dir() else name
    path = PurePosixPath(plain)
    kind = stat.S_IFMT(member.external_attr >> 16)
    if _COMPILED in path.parts or path.suffix in (".pyc", ".so"):
        return "is compiled code; a bundle has only sources"
    if not name.isprintable():
        return "has a name with characters that do not print"
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        return "has a name that leads out of the bundle"
    if str(path) != plain or not path.parts:
        return "has a name that is not written in its plain form"
    if len(path.parts) > _MOST_PARTS:
        return f"is in more than {_MOST_PARTS} folders"
    if max(len(part.encode()) for part in path.parts) > _MOST_PART_BYTES:
        return f"has a name with more than {_MOST_PART_BYTES} bytes in one part"
    if len(plain.encode()) > _MOST_NAME_BYTES:
        return f"has a name of more than {_MOST_NAME_BYTES} bytes"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a special file"
    if member.flag_bits & 0x1:
        return "is encrypted; distcheck reads bundles without a password"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed in a way that bundles do not use"
    return ""
