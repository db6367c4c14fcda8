"""Tensors as numbers in one memory, however they are kept."""

import torch


def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A sparse tensor with all its zeros; a conjugate or a negative that torch only marks as one
    (`x.mH` leaves such gradients) with its own numbers in memory; any other as it is.
    """
    if tensor is None:
        return None
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.resolve_conj().resolve_neg()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which each rank holds a part."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The whole of a tensor of which each rank holds a part: a collective then, so every rank
    must ask for the same tensors in the same order.
    """
    tensor = dense(tensor)
    if tensor is None or not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        full: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full
