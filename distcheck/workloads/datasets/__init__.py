"""Data sets: `synthetic`, computed from a hash, or files read through torchvision.

Files are read once, in a separate process, into shared memory, and mapped by ranks and references.
A module here that defines `files` is a file-based data set, found by its name.
"""

import pkgutil
from pathlib import Path

import msgspec

from distcheck.errors import UsageError, did_you_mean
from distcheck.worlds.jobs import Job

SYNTHETIC = "synthetic"
FILE_DATASETS = ("cifar10", "mnist")


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to read a data set into the file descriptor that accompanies the request."""

    name: str
    data_dir: str
    download: bool


# Its result is the description that `ArraySamples` takes, passed on without decoding.
PREPARE = Job("distcheck.workloads.datasets.files:prepare_job", PrepareRequest, bytes, ("data",))


class ArrayDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Layout and digest of the arrays; `mean` and `std` per channel, for pixels in 0..1."""

    shape: tuple[int, int, int]
    classes: int
    train_size: int
    test_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str
    note: str = ""


def dataset_names() -> dict[str, str]:
    """Return the module of every data set that `--data` accepts, by name."""
    folder = [str(Path(__file__).parent)]
    known = {found.name: f"{__name__}.{found.name}" for found in pkgutil.iter_modules(folder)}
    return {name: known[name] for name in (SYNTHETIC, *FILE_DATASETS)}


def check_dataset(name: str) -> None:
    if name not in dataset_names():
        meant = did_you_mean(name, dataset_names())
        raise UsageError(f"unknown data {name!r}{meant}; known are {', '.join(dataset_names())}")
