"""Projects a tensor onto 64 signed sums of its elements. The projection is linear, so it preserves
means and factors.

Element i is added to sum i mod 64, and the sign of each row of 64 elements depends only on its
position. `magnitudes` are sums of absolute values, which turn a rounding bound on elements into a
rounding bound on sums.
"""

import functools

import torch

SLOTS = 64
_ROWS = 1 << 14  # converted to float64 at once; heuristic: 8 MB


@functools.lru_cache(maxsize=256)
def _signs(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 2, (rows,), generator=generator).double() * 2 - 1


def project(tensor: torch.Tensor) -> torch.Tensor:
    """Return the signed sums, float64."""
    flat = tensor.detach().reshape(-1).cpu()
    rows = -(-flat.numel() // SLOTS)
    return _sums(flat, _signs(rows))


def project_magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of absolute values, float64."""
    flat = tensor.detach().reshape(-1).cpu().abs()
    rows = -(-flat.numel() // SLOTS)
    return _sums(flat, torch.ones(rows, dtype=torch.float64))


def _sums(flat: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(SLOTS, dtype=torch.float64)
    for start in range(0, len(signs), _ROWS):
        part = flat[start * SLOTS : (start + _ROWS) * SLOTS].double()
        if part.numel() % SLOTS:
            part = torch.nn.functional.pad(part, (0, -part.numel() % SLOTS))
        total += signs[start : start + _ROWS] @ part.view(-1, SLOTS)
    return total
