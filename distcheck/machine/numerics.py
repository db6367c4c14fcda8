"""Floating-point arithmetic of each dtype: unit roundoff, smallest number, and gamma(k).

The only place where these numbers are named. u is half the distance from 1.0 to the next number:
2^-p for p bits of precision (IEEE 754-2019, table 3.5; bfloat16 has p = 8). gamma(k) = k u /
(1 - k u) bounds the relative error of k roundings (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., lemma 3.1).
"""

import torch

# Unit roundoff and smallest subnormal number.
UNITS = {
    torch.float64: (2.0**-53, 2.0**-1074),
    torch.float32: (2.0**-24, 2.0**-149),
    torch.float16: (2.0**-11, 2.0**-24),
    torch.bfloat16: (2.0**-8, 2.0**-133),
}

# Dtypes whose every number a dtype holds exactly.
CONTAINED = {
    torch.float64: (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float32, torch.float16, torch.bfloat16),
    torch.float16: (torch.float16,),
    torch.bfloat16: (torch.bfloat16,),
}


class NotBoundedError(Exception):
    """No bound is known for a correct result, so there is nothing to compare with."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1.0 to the next number; for complex numbers that of their parts."""
    return UNITS[dtype.to_real() if dtype.is_complex else dtype][0]


def smallest(dtype: torch.dtype) -> float:
    """The smallest number above zero; for complex numbers that of their parts."""
    return UNITS[dtype.to_real() if dtype.is_complex else dtype][1]


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, in a last dimension of 2; real ones as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def gamma(roundings: int, unit: float) -> float:
    """The relative error that `roundings` roundings can add up to. Raises NotBoundedError."""
    if roundings * unit >= 1 / 2:  # gamma is 1 there: zero would be within it of anything
        raise NotBoundedError(
            f"{roundings} roundings of relative size {unit:.2g} may add up to all that is rounded"
        )
    return roundings * unit / (1 - roundings * unit)
