"""Expected model outputs for the samples of each data coordinate of a layout, and their tolerance.

The model of a single process computes the outputs of the whole batch (`full_batch.py`); the samples
of each data coordinate are consecutive. They are compared as one tensor, in the L2 norm.

One number that a model returns is a sum of K_l products in each of its layers l, where K_l is the
layer's input size: the elements of a weight over its outputs. The roundings of one layer are u
sqrt(K_l) of its output, and those of all layers u sqrt(sum of K_l), since they are independent
(Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, at lambda = 1), if later layers preserve their
share of the norm. A mean over the P positions of a sample adds P terms. BatchNorm's statistics are
sums over the whole batch. Splits over k ranks add as much to L layers as to a gradient. So the L2
norm of the difference is at most

    u sqrt(sum of K_l + P + 2 L (k - 1)) * norm(expected), with N P in place of P if BatchNorm
    normalizes a batch of N samples

with P >= 1024, as for gradients; in float64 at least 1e-11 of the norm, as for them. Correct code
was measured at up to 11 % of it in one process (VGG11, 1.5e-6 of 1.4e-5 for 32 images).

If the terms of a model's last sum cancel, the rounding of its outputs exceeds this bound, also in a
single process: see `own_rounding.py`.
"""

import torch

from distcheck.judge.oracles.forms import ExpectedOutputs, WithinNorm
from distcheck.judge.oracles.full_batch import FullBatch, finite_norm, relative_tolerance
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import as_float64
from distcheck.recordings.recording import Kind
from distcheck.records.layers import IN_FLOAT32


def expected_outputs(at: AtStep, layer: str, splits: int, why: str) -> ExpectedOutputs | None:
    """Return the expected outputs of a step; None if the reference returned no outputs. If the
    reference's rounding exceeds the bound, `why` is the reason.
    """
    made = at.full_batch.outputs
    if made is None:
        return None
    relative = relative_tolerance(
        layer,
        at.shares.samples if at.full_batch.ghost else 1,
        at.full_batch.positions,
        _products(at) + splits,
    )
    forms = []
    for place, part in enumerate(_split_by_coordinate(at, made)):
        bound, rounding = relative * finite_norm(part), 0.0
        error = _error(at, place, part) if layer == IN_FLOAT32 else 0.0
        if not error <= bound:
            rounding = _rounding(at, place, error, bound)
        forms.append(WithinNorm(part, bound, rounding=rounding, why=why))
    return ExpectedOutputs(tuple(forms))


def _split_by_coordinate(at: AtStep, made: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(made, [len(header.ids) for header in at.shares.headers])


def _products(at: AtStep) -> int:
    """Return the number of products in one output over all layers; a weight is [outputs, ...]."""
    weights = [spec for spec in at.specs if len(spec.shape) > 1 and spec.elements]
    return sum(spec.elements // spec.shape[0] for spec in weights)


def _error(at: AtStep, place: int, part: torch.Tensor) -> float:
    """Return the largest error in the outputs that ranks of a data coordinate recorded."""
    mesh, whole = at.references.mesh, at.references.whole
    assert mesh is not None, "outputs are recorded only in a mesh"
    wanted, found = as_float64(part), [0.0]
    for rank in mesh.ranks_of(place):
        held = whole.tensor(rank, Kind.OUTPUT, at.step, 0)
        if held is not None:
            recorded = as_float64(held[: len(part)]).to(wanted.device)
            found.append(float((recorded - wanted).norm()))
    return max(found)


def _rounding(at: AtStep, place: int, error: float, bound: float) -> float:
    def of_place(batch: FullBatch) -> torch.Tensor | None:
        made = batch.outputs
        return None if made is None else _split_by_coordinate(at, made)[place]

    return at.own_rounding.allows(of_place, error=error, bound=bound)
