"""Images and labels as byte arrays in shared memory: written once, mapped by every process.

Layout: training images, test images (uint8, [n, channels, height, width]), training labels, test
labels (uint8).
"""

import mmap
import os

import msgspec
import torch
import xxhash

from distcheck.machine.shared_tensors import mapped_tensor, raw_bytes, write_at
from distcheck.workloads.datasets import ArrayDescription


def write_arrays(fd: int, arrays: list[torch.Tensor]) -> str:
    """Write uint8 tensors consecutively from the start of the file; return their digest."""
    os.ftruncate(fd, sum(array.numel() for array in arrays))
    offset, digest = 0, xxhash.xxh3_128()
    for array in arrays:
        dense = array.contiguous()
        write_at(fd, raw_bytes(dense), offset)
        digest.update(raw_bytes(dense))
        offset += dense.numel()
    return digest.hexdigest()


class ArraySamples:
    """Reads the data of `write_arrays`; normalizes pixels per channel."""

    def __init__(self, fd: int, description: bytes) -> None:
        self._about = msgspec.msgpack.decode(description, type=ArrayDescription)
        self.shape: tuple[int, ...] = self._about.shape
        self.classes = self._about.classes
        self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)

    def size(self, *, train: bool) -> int:
        return self._about.train_size if train else self._about.test_size

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [n, *shape] in `dtype` and labels [n] int64."""
        about = self._about
        pixels = about.shape[0] * about.shape[1] * about.shape[2]
        images_at = 0 if train else about.train_size * pixels
        labels_at = (about.train_size + about.test_size) * pixels
        labels_at += 0 if train else about.train_size
        size = self.size(train=train)
        images = mapped_tensor(self._map, torch.uint8, (size, *about.shape), images_at)
        labels = mapped_tensor(self._map, torch.uint8, (size,), labels_at)
        mean = torch.tensor(about.mean).view(-1, 1, 1)
        std = torch.tensor(about.std).view(-1, 1, 1)
        return ((images[ids] / 255 - mean) / std).to(dtype), labels[ids].long()
