"""A tensor as 64 sums of its elements with signs: linear, so means and factors carry over.

Element i goes into sum i mod 64 with a sign that depends on i alone. Beside the signed sums are
those of the absolute values, by which a rounding bound on elements becomes one on sums.
"""

import functools

import torch

SLOTS = 64


@functools.lru_cache(maxsize=256)
def _signs(elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(elements)
    return torch.randint(0, 2, (elements,), generator=generator, dtype=torch.int8) * 2 - 1


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """The signed sums, float64."""
    flat = tensor.detach().reshape(-1).cpu()
    return _sums(flat.double() * _signs(flat.numel()))


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """The sums of absolute values, float64."""
    return _sums(tensor.detach().reshape(-1).cpu().double().abs())


def _sums(flat: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % SLOTS))
    return padded.reshape(-1, SLOTS).sum(0)
