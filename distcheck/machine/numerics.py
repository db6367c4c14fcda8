"""Floating-point arithmetic of each dtype: unit roundoff, smallest number, and gamma(k).

No other module defines these numbers. This module is imported without torch. u is half the distance
from 1.0 to the next number: 2^-p for p bits of precision (IEEE 754-2019, table 3.5; bfloat16 has p
= 8). gamma(k) = k u / (1 - k u) bounds the relative error of k roundings (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., lemma 3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans and backends' expectations import this without torch
    import torch

# Unit roundoff and smallest subnormal number.
_UNITS = {
    "float64": (2.0**-53, 2.0**-1074),
    "float32": (2.0**-24, 2.0**-149),
    "float16": (2.0**-11, 2.0**-24),
    "bfloat16": (2.0**-8, 2.0**-133),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}

# Dtypes whose numbers are all exact in the key's dtype.
_CONTAINED = {
    "float64": ("float64", "float32", "float16", "bfloat16"),
    "float32": ("float32", "float16", "bfloat16"),
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
}


class NotBoundedError(Exception):
    """Raised if no bound is known for a correct result, so that nothing can be compared."""


def _name(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    return _PARTS.get(name, name)


def unit_roundoff(dtype: torch.dtype | str) -> float:
    """Return half the distance from 1.0 to the next number. For complex dtypes, that of the real
    part.
    """
    return _UNITS[_name(dtype)][0]


def smallest(dtype: torch.dtype | str) -> float:
    """Return the smallest positive number. For complex dtypes, that of the real part."""
    return _UNITS[_name(dtype)][1]


def holds_all_of(dtype: torch.dtype | str, other: torch.dtype | str) -> bool:
    """Return True if every number of dtype `other` is exact in `dtype`."""
    return _name(other) in _CONTAINED[_name(dtype)]


def spacing(dtype: torch.dtype) -> float:
    """Return the distance from 1.0 to the next number, 2 u, for any floating-point dtype."""
    import torch

    return torch.finfo(dtype).eps


def perturbed(
    tensor: torch.Tensor, generator: torch.Generator, of: torch.dtype | None = None
) -> torch.Tensor:
    """Perturb every element by ±1 ULP at random, in the coarser of the two dtypes."""
    import torch

    if not tensor.is_floating_point():
        return tensor
    up = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.bool)
    if of is None or spacing(of) <= spacing(tensor.dtype):
        end = torch.where(up, float("inf"), float("-inf")).to(tensor.dtype)
        return torch.nextafter(tensor, end)
    ulp = torch.ldexp(torch.full_like(tensor, spacing(of)), torch.frexp(tensor).exponent - 1)
    return torch.where(up, tensor + ulp, tensor - ulp)


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real numbers, in an additional last dimension
    of size 2.
    """
    import torch

    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in float64; complex numbers as pairs."""
    return real_parts(tensor).double()


def every_nth_number(stride: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return every `stride`-th number [n] of a tensor. A complex element has two numbers."""
    return real_parts(tensor).reshape(-1)[::stride]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the L2 norm of the difference of two tensors, computed in float64."""
    return float((as_float64(one) - as_float64(other.to(one.device))).norm())


def gamma(roundings: int, unit: float) -> float:
    """Return the relative error bound of `roundings` roundings. Raises NotBoundedError."""
    if roundings * unit >= 1 / 2:  # gamma reaches 1 there: zero would be within it of any number
        raise NotBoundedError(
            f"{roundings} roundings of relative size {unit:.2g} may add up to all that is rounded"
        )
    return roundings * unit / (1 - roundings * unit)
