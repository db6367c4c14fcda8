"""What the backend refuses: tensors that it does not move, and shapes that do not fit together.

MPI believes its arguments: a list that is too short, or a part that is too small, would be read
and written beyond its end. All of these raise ValueError, before anything is sent.
"""

from collections.abc import Sequence

import torch


def check(what: str, tensors: Sequence[torch.Tensor], *, written: bool = False) -> None:
    """Raises ValueError for tensors that this backend does not move, or that differ in dtype."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{what}: a tensor is on {tensor.device}; backend mpi moves CPU tensors"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{what}: backend mpi moves dense tensors, not {tensor.layout}")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{what}: tensors of {tensors[0].dtype} and {tensor.dtype} together")
        if written and not tensor.is_contiguous() and _overlaps(tensor):
            raise ValueError(
                f"{what}: the result cannot be written to a tensor whose elements share memory "
                f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); give it a clone"
            )


def check_list(
    what: str,
    size: int,
    many: Sequence[torch.Tensor],
    one: torch.Tensor,
    *,
    written: bool = True,
) -> None:
    """A list of one tensor for each of `size` ranks, of as many elements as `one`."""
    check(what, [one, *many])
    check(what, many, written=written)
    check_length(what, size, many)
    for tensor in many:
        if tensor.numel() != one.numel():
            raise ValueError(
                f"{what}: a tensor of {tensor.numel()} elements among those of {one.numel()}"
            )


def check_length(what: str, size: int, many: Sequence[torch.Tensor]) -> None:
    """A list of one tensor for each rank."""
    if len(many) != size:
        raise ValueError(f"{what}: {len(many)} tensors for {size} ranks")


def check_parts(what: str, size: int, *, whole: torch.Tensor, part: torch.Tensor) -> None:
    """A tensor that holds one part for each rank."""
    check(what, [whole, part])
    if whole.numel() != size * part.numel():
        raise ValueError(f"{what}: {whole.numel()} elements are not {size} times {part.numel()}")


def counts(what: str, size: int, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
    """Elements for each rank, from numbers of rows; without any, all ranks get as many."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"{what}: {rows} rows cannot be cut into {size} equal parts")
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"{what}: splits {list(splits)} of {rows} rows, {size} ranks")
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in splits]


def _overlaps(tensor: torch.Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 1 and any(size > 1 and stride == 0 for size, stride in strides)
