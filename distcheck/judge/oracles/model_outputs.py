"""What a model returns for the samples of each data coordinate of a layout, and how far it may be
off.

The whole batch goes through one process (`full_batch.py`); each data coordinate's samples are a
stretch of it. They are compared as one tensor, in the L2 norm.

One number that a model returns is a sum of K_l products in each of its layers l, where K_l is what
the layer takes in: the elements of a weight over its outputs. The roundings of one layer are
u sqrt(K_l) of what it makes, and those of all layers u sqrt(sum of K_l), since they are independent
(Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, at lambda = 1), where the layers after it keep
their share of the norm. A mean over the P positions of a sample adds up P terms more; BatchNorm's
statistics are sums over all of a batch. Splits over k ranks add to L layers what they add there to
a gradient. So the L2 norm of the difference is at most

    u sqrt(sum of K_l + P + 2 L (k - 1)) * norm(expected), with N P in place of P where BatchNorm
    normalises a batch of N samples

with P >= 1024, as for gradients; in float64 at least 1e-11 of the norm, as for them. Correct code
was measured at up to 11 % of it in one process (VGG11, 1.5e-6 of 1.4e-5 for 32 images).

Where a model's last sum cancels, as in a difference of two values, its outputs are rounded by more
than their norm says, in one process as well. So where S32 refuses, the reference's own rounding is
measured: its outputs are taken again in float64, from the same state. An error of at most
`_LIKE_ROUNDING` times the reference's own may be rounding alone, and the check is then unknown.
"""

from collections.abc import Sequence

import torch

from distcheck.judge.oracles.at_step import AtStep
from distcheck.judge.oracles.forms import Outputs
from distcheck.judge.oracles.full_batch import norm, relative_tolerance
from distcheck.machine.numerics import real_parts
from distcheck.records.layers import IN_FLOAT32
from distcheck.training.traces.layout import Kind

# Chosen: two ways of rounding that are this many times apart are one kind of error.
_LIKE_ROUNDING = 16.0


def expected(at: AtStep, layer: str, splits: int) -> Outputs | None:
    """Those of a step; None where the reference returned none."""
    made = at.full_batch.outputs
    if made is None:
        return None
    parts = _of_coordinates(at, made)
    relative = relative_tolerance(
        layer,
        at.shares.samples if at.full_batch.ghost else 1,
        at.full_batch.positions,
        _products(at) + splits,
    )
    bounds = tuple(relative * norm(part) for part in parts)
    rounding = tuple(0.0 for _ in parts)
    if layer == IN_FLOAT32 and _refused(at, parts, bounds):
        rounding = tuple(_LIKE_ROUNDING * apart for apart in _own_rounding(at, parts))
    return Outputs(parts, bounds, rounding)


def _of_coordinates(at: AtStep, made: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(made, [len(header.ids) for header in at.shares.headers])


def _products(at: AtStep) -> int:
    """How many products go into one number, over all layers; a weight is [outputs, ...]."""
    weights = [spec for spec in at.specs if len(spec.shape) > 1 and spec.elements]
    return sum(spec.elements // spec.shape[0] for spec in weights)


def _refused(at: AtStep, parts: Sequence[torch.Tensor], bounds: Sequence[float]) -> bool:
    """Whether what some rank recorded is further off than its bound."""
    mesh, whole = at.references.mesh, at.references.whole
    assert mesh is not None, "outputs are recorded in a mesh"
    for rank in range(mesh.world):
        place = mesh.coordinate(rank, "data")
        held = whole.tensor(rank, Kind.OUTPUT, at.step, 0)
        if held is not None and not _apart(held, parts[place]) <= bounds[place]:
            return True
    return False


def _apart(held: torch.Tensor, part: torch.Tensor) -> float:
    wanted = real_parts(part).double()
    return float((real_parts(held[: len(part)]).double().to(wanted.device) - wanted).norm())


def _own_rounding(at: AtStep, parts: Sequence[torch.Tensor]) -> list[float]:
    """How far the reference's outputs are from those of float64; 0 where there are none."""
    try:
        made = at.in_double.full_batch.outputs
    except Exception:  # theirs: not every workload computes in float64
        made = None
    if made is None:
        return [0.0 for _ in parts]
    return [_apart(one, two) for one, two in zip(parts, _of_coordinates(at, made), strict=True)]
