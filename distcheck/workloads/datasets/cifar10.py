"""CIFAR-10 from a local folder or archive: 50,000 + 10,000 images, 3x32x32, ten classes."""

from pathlib import Path
from typing import Any

import torch

from distcheck.workloads.datasets.files import Split, md5_matches, unpack

_ARCHIVE = "cifar-10-python.tar.gz"


class CIFAR10Files:
    """The python version of the data set, as its authors publish it."""

    name = "cifar10"
    folder = "cifar-10-batches-py"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    classes = 10

    def candidates(self, where: Path) -> list[Path]:
        """The parent folder, the folder itself, or the archive."""
        return [where / self.folder, where, where / _ARCHIVE]

    def locate(self, where: Path) -> Path | None:
        """A folder with the first batch in it, or a tar archive."""
        if (where / "data_batch_1").is_file():
            return where
        return where if where.is_file() else None

    def open(self, found: Path, root: Path) -> None:
        """Unpacks the archive, or links the folder."""
        if found.is_file():
            unpack(found, root)
        else:
            (root / self.folder).symlink_to(found.resolve(), target_is_directory=True)

    def read(self, root: Path, *, train: bool) -> Split:
        """Through torchvision's own reader. Checksums are remarked on, not required: people
        verify on excerpts, too.
        """
        data = _without_checksums()(str(root), train=train, download=False)
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(data.targets))

    def fetch(self, root: Path) -> None:
        """From the authors' site, checksums verified."""
        from torchvision.datasets import CIFAR10

        CIFAR10(str(root), download=True)

    def remark(self, found: Path) -> str:
        """Whether these are the published files."""
        from torchvision.datasets import CIFAR10

        known: list[list[str]] = CIFAR10.train_list
        if found.is_file() or all(md5_matches(found / name, md5) for name, md5 in known):
            return ""
        return f"the files in {found} are not the published CIFAR-10 (checksums differ)"


def _without_checksums() -> Any:
    from torchvision.datasets import CIFAR10

    class LenientCIFAR10(CIFAR10):  # type: ignore[misc]
        train_list = [[name, None] for name, _ in CIFAR10.train_list]  # noqa: RUF012
        test_list = [[name, None] for name, _ in CIFAR10.test_list]  # noqa: RUF012
        meta = {**CIFAR10.meta, "md5": None}  # noqa: RUF012

    return LenientCIFAR10


files = CIFAR10Files()
