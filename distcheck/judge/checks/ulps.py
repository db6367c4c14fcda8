"""How far two tensors are apart in ULP, signed, in bins of powers of two."""

import torch

from distcheck.records.picture_sums import NONFINITE

_INTEGER = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_LOOKED_AT = 1 << 14  # elements of one tensor; a histogram needs no more


def ulp_bins(actual: torch.Tensor, expected: torch.Tensor) -> dict[int, int]:
    """Bin to number of elements, see `distcheck.records.picture_sums`. Large tensors are sampled
    evenly, and counts scaled up. `expected` is rounded to the dtype of `actual`; empty for other
    dtypes than floats.
    """
    elements = actual.numel()
    if actual.dtype not in _INTEGER or elements == 0:
        return {}
    stride = -(-elements // _LOOKED_AT)
    ours = actual.reshape(-1)[::stride]
    theirs = expected.to(actual.device).reshape(-1)[::stride].to(actual.dtype)
    finite = torch.isfinite(ours) & torch.isfinite(theirs)
    one, two = _ordered(ours), _ordered(theirs)
    distance = one - two
    rough = one.double() - two.double()  # the difference of large int64 may overflow
    distance = torch.where(rough.abs() < 2.0**53, distance.double(), rough)
    place = torch.frexp(distance.abs()).exponent * torch.sign(distance).to(torch.int32)
    place = torch.where(finite | (distance == 0), place, NONFINITE)
    found, counts = torch.unique(place, return_counts=True)
    scale = elements / ours.numel()
    pairs = zip(found.tolist(), counts.tolist(), strict=True)
    return {int(b): max(1, round(count * scale)) for b, count in pairs}


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, neighbours one apart; both zeros are 0."""
    raw = tensor.contiguous().view(_INTEGER[tensor.dtype])
    magnitude = (raw & torch.iinfo(raw.dtype).max).to(torch.int64)
    return torch.where(raw < 0, -magnitude, magnitude)
