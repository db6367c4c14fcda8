"""Contiguous tensors from sparse, lazy and distributed ones."""

import torch


def as_dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a dense tensor: sparse tensors are converted, and lazily conjugated or negated tensors
    (`x.mH` produces such gradients) are materialized.
    """
    if tensor is None:
        return None
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.resolve_conj().resolve_neg()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, of which each rank holds a shard."""
    return hasattr(tensor, "full_tensor")


def as_full_tensor(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the full tensor of a DTensor. This is a collective, so every rank must request the
    same tensors in the same order. Tensors of other types are converted by `dense`.
    """
    tensor = as_dense(tensor)
    if tensor is None or not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        full: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full
