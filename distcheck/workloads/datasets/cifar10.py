"""CIFAR-10 from a local folder or archive: 50,000 + 10,000 images, 3x32x32, ten classes."""

import io
import pickle
import warnings
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
        images = torch.cat([torch.from_numpy(batch["data"]) for batch in batches])
        labels = [label for batch in batches for label in batch["labels"]]
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


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts, lists and arrays; it refuses any other name before a call."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a function with which arrays are pickled. Raises UnpicklingError for others."""
        if (module.replace("numpy._core", "numpy.core"), name) not in _OF_ARRAYS:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, and a batch of CIFAR-10 holds arrays, numbers and texts"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy 2 warns about the names in the files
            return super().find_class(module, name)


def _read_batch(path: Path) -> dict[str, Any]:
    file = io.BytesIO(read_bounded(path))
    # latin1: Python 2 wrote the published files.
    found: dict[str, Any] = _PlainUnpickler(file, encoding="latin1").load()
    return found


files = CIFAR10Files()
