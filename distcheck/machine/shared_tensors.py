"""Tensors in files and shared memory, without pickle and numpy."""

import ctypes
import mmap
import os
import warnings

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor without copying them. They are valid while the tensor
    exists.
    """
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    if tensor.untyped_storage().nbytes() < size:
        raise ValueError("the memory of the tensor was released")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError if the file cannot grow."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def mapped_tensor(
    mapping: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return the tensor at `offset` of a read-only mapping without copying it. Do not write to the
    tensor.
    """
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not writable, as intended
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)
