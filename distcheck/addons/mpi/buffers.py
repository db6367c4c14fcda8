"""Converts tensors to the buffers that MPI sends and reduces.

MPI takes the address of contiguous memory. A tensor with another layout (a transpose, a slice,
channels last) is copied to contiguous memory before the call, and copied back afterwards.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from distcheck.addons.mpi.runtime import mpi

_NUMBERS = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
# MPI has no 16-bit floats; they are sent as integers, and reduced by torch.
_SHORT_FLOATS = (torch.bfloat16, torch.float16)
_BY_SIZE = {1: "BYTE", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_BIT_OPS = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
# For Booleans, as in NCCL: a sum is True if any is.
_TRUTH_OPS = {"SUM": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "MAX": "MAX"} | {
    "BAND": "MIN",
    "BOR": "MAX",
    "BXOR": "BXOR",
}
_REDUCE_SHORT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Return True if the memory of a tensor contains exactly its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    if is_contiguous(tensor):
        return tensor.detach()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


def contiguous_result(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a result: the tensor itself if it is contiguous, else a contiguous tensor
    of its shape.
    """
    return (
        tensor.detach() if is_contiguous(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)
    )


def concatenated_elements(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([contiguous_copy(tensor).reshape(-1) for tensor in tensors])


def copy_result_back(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result to its tensor, unless the result was written there directly."""
    if tensor.data_ptr() != result.data_ptr() or not is_contiguous(tensor):
        tensor.detach().copy_(result.view(tensor.shape))


def split_into_tensors(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Split a result into tensors: the inverse of `concatenated_elements`."""
    parts = result.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def as_mpi_buffer(tensor: torch.Tensor) -> list[Any]:
    """Return the MPI buffer of a contiguous tensor: its memory and its datatype."""
    return [_memory(tensor), getattr(mpi(), _BY_SIZE[tensor.element_size()])]


def buffer_with_counts(tensor: torch.Tensor, counts: Sequence[int]) -> list[Any]:
    """Return the MPI buffer of a contiguous tensor with `counts[rank]` elements for each rank."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    memory, datatype = as_mpi_buffer(tensor)
    return [memory, list(counts), starts, datatype]


def reduction_buffer(what: str, tensor: torch.Tensor, op: Any) -> tuple[list[Any], Any]:
    """Return the MPI buffer of a contiguous tensor and the MPI operation for a reduction. Raises
    ValueError if the operation is not defined for the dtype.
    """
    name = _name_of(op)
    dtype, module = tensor.dtype, mpi()
    if dtype in _SHORT_FLOATS and name in _OPS:
        return [_memory(tensor), module.UINT16_T], _short_op(dtype, _OPS[name])
    if dtype is torch.bool and name in _TRUTH_OPS:
        return [_memory(tensor), module.UINT8_T], getattr(module, _TRUTH_OPS[name])
    floating = dtype.is_floating_point
    known = {**_OPS, **({} if floating else _BIT_OPS)}
    if dtype in _NUMBERS and name in known and (floating or name != "AVG"):
        return [_memory(tensor), getattr(module, _NUMBERS[dtype])], getattr(module, known[name])
    raise ValueError(f"{what}: backend mpi does not support {name} of {dtype}")


def is_averaging_op(op: Any) -> bool:
    """Return True for AVG: the sum must be divided by the world size."""
    return bool(op == ReduceOp.AVG)


def _name_of(op: Any) -> str:
    for name in (*_OPS, *_BIT_OPS):
        if op == getattr(ReduceOp, name):
            return name
    return str(op)


def _memory(tensor: torch.Tensor) -> Any:
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@functools.cache
def _short_op(dtype: torch.dtype, name: str) -> Any:
    """Return an MPI operation for 16-bit floats. It rounds after every addition, as gloo does."""
    reduce = _REDUCE_SHORT[name]

    def both(incoming: Any, inout: Any, _: Any) -> None:
        theirs = torch.frombuffer(incoming, dtype=dtype)
        ours = torch.frombuffer(inout, dtype=dtype)
        torch.no_grad()(reduce)(theirs, ours, out=ours)  # type: ignore[call-arg]

    return mpi().Op.Create(both, commute=True)
