"""CIFAR-10 from a local folder or archive: 50,000 + 10,000 images, 3x32x32, ten classes."""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch

from distcheck.records.decoding import read_bounded
from distcheck.workloads.datasets.files import DatasetSplit, md5_matches, unpack

_ARCHIVE = "cifar-10-python.tar.gz"
_TRAIN, _TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",)
_OF_ARRAYS = (
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
)
_PIXELS = 3 * 32 * 32
_MOST_STEPS = 1 << 17  # of a pickle: five for each image that fits in a file


class CIFAR10Files:
    """The Python version of the data set, as its authors publish it."""

    name = "cifar10"
    folder = "cifar-10-batches-py"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    classes = 10

    def candidates(self, where: Path) -> list[Path]:
        """Return the possible places: a subfolder, the given folder, and the archive."""
        return [where / self.folder, where, where / _ARCHIVE]

    def locate(self, where: Path) -> Path | None:
        """Return the path if it is a folder with the first batch in it, or a tar archive."""
        if (where / "data_batch_1").is_file():
            return where
        return where if where.is_file() else None

    def open(self, found: Path, root: Path) -> None:
        if found.is_file():
            unpack(found, root)
        else:
            (root / self.folder).symlink_to(found.resolve(), target_is_directory=True)

    def read(self, root: Path, *, train: bool) -> DatasetSplit:
        """Read one split, without torchvision, which unpickles any file and so runs any code in it.
        A wrong checksum only produces a note: users also verify on excerpts.
        """
        names = _TRAIN if train else _TEST
        batches = [_read_batch(root / self.folder / name) for name in names]
        images = torch.cat([_images(batch["data"]) for batch in batches])
        labels = [label for batch in batches for label in _labels(batch["labels"], self.classes)]
        return DatasetSplit(images.view(-1, 3, 32, 32), torch.tensor(labels))

    def fetch(self, root: Path) -> None:
        """Download from the authors' site, and verify checksums."""
        from torchvision.datasets import CIFAR10

        CIFAR10(str(root), download=True)

    def remark(self, found: Path) -> str:
        """Return a note if the files are not the published ones."""
        from torchvision.datasets import CIFAR10

        known: list[list[str]] = CIFAR10.train_list
        if found.is_file() or all(md5_matches(found / name, md5) for name, md5 in known):
            return ""
        return f"the files in {found} are not the published CIFAR-10 (checksums differ)"


class _Call:
    """A call that a pickle contains, and that is not made: NumPy does not check the dtypes and
    sizes of a pickle, so that an array from one may contain any address.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts, lists and arrays; it refuses any other name before a call."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a function of arrays. Raises UnpicklingError for others."""
        if (module.replace("numpy._core", "numpy.core"), name) not in _OF_ARRAYS:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, and a batch of CIFAR-10 holds arrays, numbers and texts"
            )
        return _Call


def _read_batch(path: Path) -> dict[str, Any]:
    content = read_bounded(path)
    # Before it is unpickled: a PUT takes memory for as many objects as the number in it says.
    for step, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        place = int(argument or 0) if opcode.name.endswith("PUT") else 0
        if max(step, place) > _MOST_STEPS:
            raise pickle.UnpicklingError("it has more steps than a batch of CIFAR-10")
    # latin1: Python 2 wrote the published files.
    found: dict[str, Any] = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    return found


def _images(array: Any) -> torch.Tensor:
    """Return the bytes of an array [n, 3072], row by row. Raises UnpicklingError for others."""
    match array:
        case _Call(state=(_, shape, _Call(arguments=("u1", *_)), bool(is_fortran), data)):
            pass
        case _Call(arguments=(data, _Call(arguments=("u1", *_)), shape, "C" | "F" as order)):
            is_fortran = order == "F"  # protocol 5
        case _:
            shape = data = None
    if isinstance(data, _Call) and data.arguments[1:] == ("latin1",):  # protocols 0 to 2
        data = data.arguments[0]
    if isinstance(data, str):
        data = data.encode("latin1")
    count, left = divmod(len(data) if isinstance(data, bytes | bytearray) else 0, _PIXELS)
    if data is None or count == 0 or left or shape != (count, _PIXELS):
        raise pickle.UnpicklingError(f"a batch of CIFAR-10 is an array of n x {_PIXELS} bytes")
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(_PIXELS, count).T.reshape(-1) if is_fortran else flat


def _labels(numbers: Any, classes: int) -> list[int]:
    """Return the list. Raises UnpicklingError for anything but numbers of classes."""
    if type(numbers) is list and all(type(one) is int and 0 <= one < classes for one in numbers):
        return numbers
    raise pickle.UnpicklingError(f"the labels of CIFAR-10 are numbers from 0 to {classes - 1}")


files = CIFAR10Files()
