"""Micro-batches that a strategy's backward makes without a promise in its contract.

If `micro_batches` is promised, each is weighted by its samples, in a known order, so local
gradients and losses must be bit-identical. Code without that promise may divide its loss by the
number of micro-batches (accelerate, Fabric). For equal micro-batches that is the same value, but
rounded differently, and so is everything that backward derives from it.

So expectations are computed over the observed micro-batches, and results with different bits must
be within the tolerance of full batch float32 (in float64 of full batch float64), as an L2 norm:
`full_batch.py` derives that tolerance for two ways to compute one gradient. It is 3e-5 of the
module's largest gradient for 256 images: less than any wrong weight, and less than rounding to a
lower-precision dtype.
"""

from collections.abc import Sequence

import torch

from distcheck.judge.oracles.forms import (
    EitherForm,
    ExactBits,
    Form,
    RankLosses,
    WithinNorm,
    with_positive_zero,
)
from distcheck.judge.oracles.full_batch import (
    loss_tolerance,
    module_scales,
    relative_tolerance,
    tolerance_of,
)
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import unit_roundoff


def unpromised_sentence(at: AtStep) -> str:
    """Return the report's sentence about unpromised micro-batches, or ""."""
    if not at.references.unpromised:
        return ""
    count = at.contract.micro_batches
    return (
        f"backward ran over {count} micro-batches of each shard, but the contract promises 1: "
        f"@strategy(micro_batches={count}) allows bitwise comparison"
    )


def micro_batch_excuse(at: AtStep) -> str:
    """Return the reason that results with different bits pass."""
    return (
        "results are not bit-identical to micro-batches weighted by their samples, but within "
        f"the tolerance of {at.full_batch_layer}"
    )


def _tolerances(at: AtStep, gradients: list[torch.Tensor | None], samples: int) -> list[float]:
    """Return the tolerance of each gradient over so many samples."""
    layer = at.full_batch_layer
    scales = module_scales([spec.name for spec in at.specs], gradients)
    relative = relative_tolerance(layer, samples, at.full_batch.positions)
    short = unit_roundoff(at.ingredients.dtype) / unit_roundoff(torch.float32)
    relative *= max(1.0, short)  # a less precise dtype rounds more
    return [tolerance_of(spec, layer, relative, scales, samples) for spec in at.specs]


def local_gradient_forms(at: AtStep) -> tuple[tuple[Form | None, ...], ...]:
    """Return every rank's local gradients: [rank][parameter]."""
    found = []
    for shard, size in zip(at.shards, at.shares.sizes, strict=True):
        tolerances = _tolerances(at, shard.gradients, size)
        pairs = zip(shard.gradients, tolerances, strict=True)
        found.append(
            tuple(
                None
                if g is None
                else EitherForm(ExactBits(g), WithinNorm(g, most), excuse=micro_batch_excuse(at))
                for g, most in pairs
            )
        )
    return tuple(found)


def loss_forms(at: AtStep, exact: Sequence[Form]) -> RankLosses:
    """Return the forms of each rank's loss: `exact`, or near the recomputed loss."""
    # Derived: each of K terms is multiplied or divided twice, and added to K - 1 others; in both.
    room = (2 * at.contract.micro_batches + 4) * unit_roundoff(at.ingredients.dtype)
    bounds = [
        max(loss_tolerance(at.full_batch_layer, shard.loss_terms), room * shard.loss_terms)
        for shard in at.shards
    ]
    forms = tuple(
        EitherForm(
            form, WithinNorm(with_positive_zero(shard.loss), bound), excuse=micro_batch_excuse(at)
        )
        for form, shard, bound in zip(exact, at.shards, bounds, strict=True)
    )
    return RankLosses(forms)


def mean_tolerances(at: AtStep) -> tuple[float, ...]:
    """Return the additional tolerance of gradients; empty if every micro-batch is promised."""
    if not at.references.unpromised:
        return ()
    return tuple(_tolerances(at, list(at.full_batch.gradients), at.shares.samples))
