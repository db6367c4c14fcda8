"""Micro-batches that a strategy's own backward makes, and that its contract does not promise.

Where `micro_batches` is promised, each of them counts by its share of the shard's samples, in an
order that is known, so local gradients and losses must be bit-identical. Code that says nothing may
as well divide its loss by their number (accelerate, Fabric): for equal micro-batches that is the
same number, rounded otherwise, and backward rounds everything that follows from it otherwise, too.

So what is expected is computed over the micro-batches that were seen, and what has other bits must
be within the tolerance of full batch float32 (in float64 of full batch float64) of it, as an L2
norm: `full_batch.py` derives that tolerance for two ways to compute one gradient. It is 3e-5 of the
largest gradient of the module for 256 images: less than any wrong weight, and less than rounding to
a shorter dtype.
"""

from collections.abc import Sequence

import torch

from distcheck.judge.oracles.forms import Bits, Either, Form, Near, RankLosses, number
from distcheck.judge.oracles.full_batch import (
    loss_tolerance,
    module_scales,
    relative_tolerance,
    tolerance_of,
)
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import unit_roundoff


def said(at: AtStep) -> str:
    """What a report says of such micro-batches; empty where there are none."""
    if not at.references.unpromised:
        return ""
    count = at.contract.micro_batches
    return (
        f"backward ran over {count} micro-batches of each shard, and the contract promises 1: "
        f"@strategy(micro_batches={count}) lets bits be compared"
    )


def excuse(at: AtStep) -> str:
    """Why what has other bits passes."""
    return (
        "bits differ from those of micro-batches that count by their samples, by less than the "
        f"tolerance of the {at.full_batch_layer} layer"
    )


def _tolerances(at: AtStep, gradients: list[torch.Tensor | None], samples: int) -> list[float]:
    """For each of some gradients over so many samples."""
    layer = at.full_batch_layer
    scales = module_scales([spec.name for spec in at.specs], gradients)
    relative = relative_tolerance(layer, samples, at.full_batch.positions)
    short = unit_roundoff(at.ingredients.dtype) / unit_roundoff(torch.float32)
    relative *= max(1.0, short)  # a dtype that is shorter than the layer's rounds by more
    return [tolerance_of(spec, layer, relative, scales, samples) for spec in at.specs]


def own(at: AtStep) -> tuple[tuple[Form | None, ...], ...]:
    """What every rank's backward leaves: [rank][parameter]."""
    found = []
    for shard, size in zip(at.shards, at.shares.sizes, strict=True):
        tolerances = _tolerances(at, shard.gradients, size)
        pairs = zip(shard.gradients, tolerances, strict=True)
        found.append(
            tuple(
                None if g is None else Either(Bits(g), Near(g, most), excuse=excuse(at))
                for g, most in pairs
            )
        )
    return tuple(found)


def losses(at: AtStep, exact: Sequence[Form]) -> RankLosses:
    """What each rank's loss may be beside what is `exact`: near to what is computed again."""
    # Derived: of K terms, each is multiplied or divided twice, and added to K - 1 others; in both.
    room = (2 * at.contract.micro_batches + 4) * unit_roundoff(at.ingredients.dtype)
    bounds = [
        max(loss_tolerance(at.full_batch_layer, shard.loss_terms), room * shard.loss_terms)
        for shard in at.shards
    ]
    forms = tuple(
        Either(form, Near(number(shard.loss), bound), excuse=excuse(at))
        for form, shard, bound in zip(exact, at.shards, bounds, strict=True)
    )
    return RankLosses(forms, tuple(shard.loss for shard in at.shards), max(bounds, default=0.0))


def of_mean(at: AtStep) -> tuple[float, ...]:
    """How far the synchronized gradients may be from the mean of what is expected of the ranks;
    empty where every micro-batch is promised.
    """
    if not at.references.unpromised:
        return ()
    return tuple(_tolerances(at, list(at.full_batch.gradients), at.shares.samples))
