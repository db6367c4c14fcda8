"""Finds a data set's files in standard places, and reads them through torchvision."""

import bz2
import contextlib
import gzip
import importlib
import lzma
import os
import platform
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import torch

from distcheck.errors import CannotRunError, UsageError
from distcheck.workloads.datasets import PREPARE, ArrayDescription, PrepareRequest, dataset_names
from distcheck.workloads.datasets.arrays import write_arrays
from distcheck.worlds import scratch
from distcheck.worlds.jobs import Descriptors, Reporter

MOST_BYTES = 1 << 30  # of an unpacked archive: five times the published ones
_MOST_HEADER_BYTES = 1 << 16  # of a member. Heuristic: the published ones have 512
_OPENERS = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}


@dataclass(frozen=True)
class DatasetSplit:
    """Images uint8 [n, channels, height, width] and labels [n] of one split."""

    images: torch.Tensor
    labels: torch.Tensor


class FileDataset(Protocol):
    """Interface of a file-based data set; see cifar10.py."""

    name: str
    folder: str  # the folder that torchvision expects below its root
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int

    def locate(self, where: Path) -> Path | None:
        """Return `where` if it is the folder or archive with the files, or else None."""
        ...

    def candidates(self, where: Path) -> list[Path]:
        """Return possible locations of the files, given the user's folder."""
        ...

    def open(self, found: Path, root: Path) -> None:
        """Make `found` readable for torchvision below `root`."""
        ...

    def read(self, root: Path, *, train: bool) -> DatasetSplit: ...

    def fetch(self, root: Path) -> None: ...

    def remark(self, found: Path) -> str:
        """Return a note for the user about these files, or an empty string."""
        ...


@PREPARE.does
def prepare_job(job: PrepareRequest, fds: Descriptors, reporter: Reporter) -> bytes:
    """Read (or download) files in a separate process, and return their description."""
    reporter.progress(0, f"read {job.name}")
    return prepare(job.name, job.data_dir, download=job.download, fd=fds["data"])


def prepare(name: str, data_dir: str, *, download: bool, fd: int) -> bytes:
    """Read the data set into `fd`; return its description for `ArraySamples`.

    Raises CannotRunError if the files are missing, unreadable or cannot be downloaded.
    """
    dataset: FileDataset = importlib.import_module(dataset_names()[name]).files
    _require_torchvision(name)
    where = Path(data_dir).expanduser()
    if download and _find_files(dataset, where) is None:
        _download(dataset, where)
    found = _find_files(dataset, where)
    if found is None:
        tried = ", ".join(str(path) for path in dataset.candidates(where))
        raise CannotRunError(
            f"{name} is not in {where}: tried {tried}; pass --data-dir the folder that holds "
            f"{dataset.folder}, that folder itself or the archive, or add --download"
        )
    with _readable_root(dataset, found) as root:
        try:
            train, test = dataset.read(root, train=True), dataset.read(root, train=False)
        except Exception as error:  # unpickling a damaged file may raise anything
            raise CannotRunError(
                f"{name} in {found} cannot be read ({_in_one_line(error)}); "
                "the files are damaged or incomplete"
            ) from error
    _check_splits(name, found, train, test)
    labels = [split.labels.to(torch.uint8) for split in (train, test)]
    digest = write_arrays(fd, [train.images, test.images, *labels])
    shape = tuple(train.images.shape[1:])
    return msgspec.msgpack.encode(
        ArrayDescription(
            digest=digest,
            shape=(shape[0], shape[1], shape[2]),
            classes=dataset.classes,
            train_size=len(train.labels),
            test_size=len(test.labels),
            mean=dataset.mean,
            std=dataset.std,
            note=dataset.remark(found),
        )
    )


def _require_torchvision(name: str) -> None:
    try:
        importlib.import_module("torchvision")
    except ImportError as error:
        raise CannotRunError(
            f"data {name} is read through torchvision, which is not installed ({error}); "
            "pip install 'distcheck[data]'"
        ) from error
    except Exception as error:  # a torchvision built for another torch fails in many ways
        raise CannotRunError(
            f"data {name} is read through torchvision, which does not load with torch "
            f"{torch.__version__} ({error}); install the torchvision that matches it"
        ) from error


def _check_splits(name: str, found: Path, train: DatasetSplit, test: DatasetSplit) -> None:
    for split in (train, test):
        if len(split.labels) == 0 or len(split.labels) != len(split.images):
            raise CannotRunError(
                f"{name} in {found} holds {len(split.images)} images and {len(split.labels)} "
                "labels in one of its splits; the files are damaged or incomplete"
            )


def _find_files(dataset: FileDataset, where: Path) -> Path | None:
    for candidate in dataset.candidates(where):
        found = dataset.locate(candidate)
        if found is not None:
            return found
    return None


@contextlib.contextmanager
def _readable_root(dataset: FileDataset, found: Path) -> Iterator[Path]:
    with scratch.folder() as root:
        try:
            dataset.open(found, root)
        except (
            OSError, EOFError, RecursionError, lzma.LZMAError, tarfile.TarError, zlib.error,
        ) as error:  # fmt: skip
            raise CannotRunError(
                f"{dataset.name} in {found} cannot be opened ({_in_one_line(error)}); "
                "the file is damaged"
            ) from error
        yield root


def _download(dataset: FileDataset, where: Path) -> None:
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--data-dir {where} cannot be created: {error}") from error
    try:
        with scratch.folder(where, ".distcheck-download-") as root:
            dataset.fetch(root)
            target = where / dataset.folder
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(root / dataset.folder, target)
    except Exception as error:
        raise CannotRunError(
            f"{dataset.name} could not be downloaded to {where} ({_in_one_line(error)}); "
            "download it on a machine with a network and pass its folder with --data-dir"
        ) from error


def _in_one_line(error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}".rstrip(": ")


def too_large_message(archive: Path) -> str:
    """Return the error message for an archive that would fill the disk."""
    return (
        f"{archive} unpacks to more than {MOST_BYTES >> 20} MiB, which is more than any data set "
        "that distcheck knows; use the published file"
    )


class _Metered:
    """A decompressed archive with at most `left` more bytes: tarfile reads headers whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self.left = _MOST_HEADER_BYTES
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError(f"a header has more than {_MOST_HEADER_BYTES >> 10} KiB")
        return self._file.read(size)


def unpack(archive: Path, root: Path) -> None:
    """Unpack a tar archive below `root`. Members that would land outside it raise an error.

    Raises CannotRunError if this Python version cannot filter such members.
    """
    if not hasattr(tarfile, "data_filter"):
        raise CannotRunError(
            f"{archive} cannot be unpacked safely by Python {platform.python_version()}, but "
            "3.11.4 and later can; unpack it, and pass its folder with --data-dir"
        )
    left = MOST_BYTES
    with archive.open("rb") as file:
        opener: Any = _OPENERS.get(file.read(2), open)
    with opener(archive, "rb") as file:
        metered: Any = _Metered(file)
        with tarfile.open(fileobj=metered, mode="r:") as tar:
            for member in tar:
                left -= member.size + tarfile.BLOCKSIZE
                if left < 0:
                    raise CannotRunError(too_large_message(archive))
                metered.left = member.size + tarfile.BLOCKSIZE
                tar.extract(member, root, filter="data")
                metered.left = _MOST_HEADER_BYTES


def md5_matches(path: Path, expected: str) -> bool:
    module: Any = importlib.import_module("torchvision.datasets.utils")
    return bool(module.check_integrity(str(path), expected))
