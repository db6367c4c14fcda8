"""MNIST from a local folder: 60,000 + 10,000 images, 1x28x28, ten classes."""

import gzip
from pathlib import Path

from distcheck.errors import CannotRunError
from distcheck.workloads.datasets.files import MOST_BYTES, DatasetSplit, too_large_message

_PIECE_BYTES = 1 << 20
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class MNISTFiles:
    """The four idx files, with or without gzip compression."""

    name = "mnist"
    folder = "MNIST/raw"
    mean = (0.1307,)
    std = (0.3081,)
    classes = 10

    def candidates(self, where: Path) -> list[Path]:
        """Return the possible places: below a parent folder, `MNIST`, and the given folder."""
        return [where / "MNIST" / "raw", where / "raw", where]

    def locate(self, where: Path) -> Path | None:
        """Return the folder if it has all four files, each compressed or not."""
        found = all(self._file(where, name) is not None for name in _FILES)
        return where if found else None

    def open(self, found: Path, root: Path) -> None:
        """Link plain files, and decompress the others."""
        folder = root / self.folder
        folder.mkdir(parents=True)
        for name in _FILES:
            source = self._file(found, name)
            assert source is not None, "locate() found all four"
            if source.suffix == ".gz":
                _unpack(source, folder / name)
            else:
                (folder / name).symlink_to(source.resolve())

    def read(self, root: Path, *, train: bool) -> DatasetSplit:
        from torchvision.datasets import MNIST

        data = MNIST(str(root), train=train, download=False)
        return DatasetSplit(data.data.unsqueeze(1), data.targets)

    def fetch(self, root: Path) -> None:
        """Download from torchvision's mirrors, and verify checksums."""
        from torchvision.datasets import MNIST

        MNIST(str(root), download=True)

    def remark(self, found: Path) -> str:
        """Return "": the format has no checksum to verify."""
        return ""

    def _file(self, where: Path, name: str) -> Path | None:
        for path in (where / name, where / f"{name}.gz"):
            if path.is_file():
                return path
        return None


def _unpack(source: Path, target: Path) -> None:
    left = MOST_BYTES
    with gzip.open(source) as packed, target.open("wb") as plain:
        while piece := packed.read(_PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise CannotRunError(too_large_message(source))
            plain.write(piece)


files = MNISTFiles()
