"""full batch float64 and float32: the full batch of a step, forward and backward once, in one
process.

This is single-process training at equal global batch size. It shares no arithmetic with the shards
(kernels block and sum differently), so it agrees only up to rounding.

BatchNorm is the exception. Shards that normalize separately do not train the model of a single
process, however they synchronize; the expectation is then the *ghost batch* (Hoffer, Hubara and
Soudry, arXiv:1705.08741): one pass over the whole batch in which BatchNorm normalizes each shard's
samples separately (ghost_batch.py). Its distance from true full-batch training is measured and
reported. In eval mode BatchNorm uses batch statistics neither in the ranks nor here.

Tolerance, per tensor: the L2 norm of the difference is at most

    relative * the largest norm(expected) among the tensors of the same module

where, with N samples and P positions, the rounding error of a sum of N P terms grows like the root
of its length (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, at lambda = 1):

full batch float32
     relative = u sqrt(N P), u = 2^-24. P is the number of positions of a sample at which a layer is
     applied, counted in the reference's own forward pass (longest_sum.py). It is at least 32 x 32,
     the maximum of the built-in workloads, so that short sums in a deep network have the same
     tolerance: 3.1e-5 for 256 images. Correct code was measured at up to 1.1e-5.
full batch float64
     relative = 1e-11, or u sqrt(N P) with u = 2^-53 if that is larger, which takes sums of 8e9
     terms. Correct code was measured at up to 2e-14 (VGG11, ghost batch). The rest is a margin for
     deeper networks, and still a millionth of the smallest error that matters.

The module's largest tensor sets the scale because a tensor's own norm may be rounding noise: the
exact gradient of a bias in front of BatchNorm is zero. It is the sum of the same cotangents that
enter the weight's gradient, so its error has the size of the weight's error. (Against the weight's
norm, correct code was measured at up to 2e-6 in float32.)

Layers that are split over k ranks (docs/layouts.md): a sum of K products is then k sums of K / k
products, and k - 1 additions between them. A term goes through K / k - 1 of the former and at most
k - 1 of the latter, which is K - 1 at most for 1 <= k <= K: the bound of such a sum, gamma(K - 1)
times the sum of absolute values (Higham, section 4.2), is at most that of the sum in one piece. The
root of N P does not include the additions between ranks, at most k - 1 in each of L layers, forward
and backward: N P becomes N P + 2 L (k - 1), for L all the modules that have parameters.

Terms that fall below the smallest normal number are rounded to a multiple of the smallest one, tiny
(2^-149 in float32), whatever their size. An element's gradient is a sum of N samples' terms, each
the result of a product with an error of tiny / 2, in the shards and in the whole batch. Weight and
division add a few such errors, fewer than N. Sums do not underflow. So both layers allow an
additional L2 norm of

2 N tiny sqrt(elements), 7e-43 for one element and 256 images, below every normal number. (A term
that underflows earlier in backward, and is then multiplied by a large number, may have a larger
error.)

Both assume that the gradient is a smooth function of the rounded values. This is not true at a kink
(a ReLU at 0, a maximum of equal numbers, a clamp at its limit). If a unit's input is nearer to a
kink than its own rounding error, the full batch may compute it on the other side than the shard
did, and this sample's whole share of the gradient appears or vanishes, however small the rounding
was. Both results are right. So a gradient that full batch float32 refuses is compared, within the
same tolerance, with the mean of the shards' gradients, each computed again in one process, provided
that this mean *is* the whole batch's gradient: in float64, from the same parameters, the two agree
within the tolerance of full batch float64. There a kink is undecided 2^29 times more rarely, and
all other differences between shards and the full batch (interacting samples, weights, a sum in
place of a mean) are as large as in float32. Small networks over few samples needed this once in
some hundred runs. A long sum whose terms cancel, such as that of a convolution over 65,536
positions, needs it as well: its rounding error is proportional to its terms, and may exceed a
fraction of their sum. In a layout, no rank has a shard's gradient, and ranks on another device have
gradients that cannot be recomputed here; kinks.py and own_rounding.py handle these cases.

A loss is the mean of the samples' losses l_i. Each of them is computed up to a few roundings, and
so are their sums, so two ways of computing their mean differ by at most

    relative * (sum of |l_i|) / N

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2): 1e-6 is 17 u for
full batch float32, 1e-13 is 900 u for full batch float64. If all losses have one sign, this is
relative to the mean itself. Losses of both signs (policy gradients, critics) may cancel. Only then
are the l_i computed one by one: they are the batch's own terms, so the bound does not exceed the
rounding of their sum.

A loss that is itself a long sum (token by token, in a loop) may round by more, in the ranks and in
the full batch. A loss that full batch float32 refuses is compared, within the same tolerance, with
the mean of the shards' losses, each computed again, provided that in float64 this mean is the whole
batch's loss within the tolerance of full batch float64.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Any

import torch

from distcheck.contract import Batch
from distcheck.judge.oracles.ghost_batch import GhostBatch, GhostSegment
from distcheck.judge.oracles.longest_sum import LongestSum
from distcheck.judge.oracles.shards import StepReference, load_state, micro_batch_sizes
from distcheck.machine import seeds
from distcheck.machine.numerics import as_float64, real_parts, smallest, unit_roundoff
from distcheck.recordings.recording import Kind
from distcheck.records import TensorSpec
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64
from distcheck.training.adapters.forms import trained_with
from distcheck.training.building import recorded_parameters
from distcheck.training.outputs import record_outputs
from distcheck.training.whole_tensors import as_dense

# Measured: the least P, that of the bundled workloads, with which correct code reached a third of
# the tolerance of full batch float32. A larger one is counted.
_POSITIONS = 32 * 32
# Measured: correct code reached up to 2e-14.
_FLOAT64_RELATIVE = 1e-11
# Measured: a loss is one mean of N, with far fewer roundings than a gradient; correct code reached
# a tenth of it.
_LOSS_RELATIVE = {IN_FLOAT32: 1e-6, IN_FLOAT64: 1e-13}
# Heuristic, relative to their size: terms that are further from the batch's loss are not its terms,
# and widen nothing. Far above float32 rounding.
_KNOWN_TERMS = 1e-3


@dataclass(frozen=True)
class FullBatch:
    """The batch's mean loss and gradients; None for a parameter without a gradient.

    ghost      True if some BatchNorm normalized parts of the batch separately, so that shards
               cannot equal the full batch
    positions  the largest number of terms of one sample that a layer adds
    outputs    [samples, numbers]: the model's outputs, if ranks recorded theirs
    buffers    buffers after forward
    """

    loss: float
    gradients: list[torch.Tensor | None]
    ghost: bool
    positions: int = 0
    outputs: torch.Tensor | None = None
    buffers: tuple[torch.Tensor, ...] = ()


def relative_tolerance(layer: str, batch: int, positions: int = 0, splits: int = 0) -> float:
    """Return the relative L2 tolerance of a layer; see the module docstring. `splits` are the
    additions between ranks that a term goes through, forward and backward.
    """
    terms = batch * max(_POSITIONS, positions) + splits
    if layer == IN_FLOAT64:
        return max(_FLOAT64_RELATIVE, unit_roundoff(torch.float64) * sqrt(terms))
    return unit_roundoff(torch.float32) * sqrt(terms)


def module_scales(
    names: Sequence[str], gradients: Sequence[torch.Tensor | None]
) -> dict[str, float]:
    """Return each module's largest gradient norm; a module is a name up to its last dot."""
    scales: dict[str, float] = {}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            module = name.rpartition(".")[0]
            scales[module] = max(scales.get(module, 0.0), finite_norm(gradient))
    return scales


def finite_norm(tensor: torch.Tensor) -> float:
    """Return the L2 norm of the finite elements in float64; both parts of complex numbers count."""
    parts = as_float64(tensor)
    return float(torch.where(parts.isfinite(), parts, 0.0).norm())


def underflow_error(layer: str, batch: int, elements: int) -> float:
    """Return the largest L2 error of adding terms that underflow; see the module docstring."""
    tiny = smallest(torch.float64 if layer == IN_FLOAT64 else torch.float32)
    return 2.0 * batch * tiny * sqrt(elements)


def tolerance_of(
    spec: TensorSpec, layer: str, relative: float, scales: Mapping[str, float], samples: int
) -> float:
    """Return the tolerance of one parameter's gradient, as an L2 norm, from its module's norms."""
    scale = scales.get(spec.name.rpartition(".")[0], 0.0)
    return relative * scale + underflow_error(layer, samples, spec.elements)


def loss_tolerance(layer: str, magnitude: float) -> float:
    """Return the tolerance of the mean loss; `magnitude` is the losses' mean absolute value."""
    return _LOSS_RELATIVE[layer] * abs(magnitude)


class FullBatchReference(StepReference):
    """Runs full batches."""

    def separately_normalized_sizes(self, shards: Sequence[int]) -> list[int]:
        """Return the sizes that BatchNorm normalizes separately: shards or micro-batches."""
        return [stretch.samples for stretch in self._stretches(shards)]

    def _stretches(self, shards: Sequence[int]) -> list[GhostSegment]:
        count = self._contract.micro_batches * self._ingredients.training.accumulate
        return [
            GhostSegment(size, rank)
            for rank, samples in enumerate(shards)
            for size in micro_batch_sizes(samples, count)
        ]

    def run(
        self,
        step: int,
        *,
        ghost: bool = True,
        within: AbstractContextManager[Any] | None = None,
        moved: int | None = None,
    ) -> FullBatch:
        """Run the batch of one step from rank 0's state, shards one after the other.

        `ghost=False` lets BatchNorm normalize over the full batch, like a single process. The
        passes run `within` a context, if given. `perturbed` is the seed for perturbing each
        parameter by ±1 ULP.
        """
        batch, shards = self._prepare(step)
        if moved is not None:
            self._perturb(moved)
        stretches = self._stretches(shards) if ghost else [GhostSegment(sum(shards), 0)]
        under = seeds.under(self._trace.header(0, step).settings)
        counting = LongestSum(self._model, sum(shards))
        outer = within or contextlib.nullcontext()
        watching = record_outputs(self._model, sum(shards)) if self._trace.layout.outputs else None
        watched = watching or contextlib.nullcontext()
        with outer, under, self._ghost_of(step, stretches) as layers, counting, watched as calls:
            loss = self._ingredients.loaded.workload.loss(self._model, batch)
            loss.backward()
        return FullBatch(
            loss=float(loss.detach()),
            gradients=[as_dense(p.grad) for _, p in recorded_parameters(self._model)],
            ghost=layers.normalized,
            positions=counting.terms,
            outputs=None if calls is None else calls.rows,
            buffers=tuple(buffer.clone() for buffer in self._model.buffers()),
        )

    def loss_magnitude(self, step: int, loss: float) -> float:
        """Return the mean absolute value of the samples' losses, whose mean is `loss`. If they are
        unknown, return the absolute value of `loss`.
        """
        batch, shards = self._prepare(step)
        loss_of, terms = self._ingredients.loaded.workload.loss, []
        under = seeds.under(self._trace.header(0, step).settings)
        with under, self._ghost_of(step, self._stretches(shards), keep_outputs=True) as layers:
            loss_of(self._model, batch)
            for sample in range(sum(shards)):
                layers.alone(sample)
                try:
                    terms.append(
                        float(loss_of(self._model, batch.part(sample, sample + 1)).detach())
                    )
                except Exception:  # a workload's loss may not accept a single sample
                    return abs(loss)
        magnitude = fsum(map(abs, terms)) / len(terms)
        # A loss that is not a mean over its samples is not the mean of these.
        known = abs(fsum(terms) / len(terms) - loss) <= _KNOWN_TERMS * magnitude
        return max(magnitude, abs(loss)) if known else abs(loss)

    def _prepare(self, step: int) -> tuple[Batch, list[int]]:
        """Load the model before a step; return the step's batch and the ranks' sample numbers."""
        trace = self._trace
        shards = [trace.header(rank, step).ids for rank in range(trace.layout.world)]
        ids = torch.tensor([i for shard in shards for i in shard], dtype=torch.int64)
        load_state(self._model, trace, rank=0, buffers_of=0, step=step)
        self._ingredients.prepare(self._model, step)
        return self._ingredients.batch(ids, len(ids)), [len(shard) for shard in shards]

    def _perturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in recorded_parameters(self._model):
                parts = real_parts(parameter)
                up = torch.randint(0, 2, parts.shape, generator=generator, dtype=torch.bool)
                to = torch.where(up, math.inf, -math.inf).to(parts)
                parts.copy_(torch.nextafter(parts, to))

    def _ghost_of(
        self, step: int, stretches: Sequence[GhostSegment], *, keep_outputs: bool = False
    ) -> GhostBatch:
        trace, of_rank_0 = self._trace, self._contract.buffers == "rank 0"
        places = {spec.name: index for index, spec in enumerate(trace.layout.model.buffers)}

        def buffers_of(rank: int, name: str) -> torch.Tensor | None:
            holder = 0 if of_rank_0 else rank
            known = name in places
            return trace.tensor(holder, Kind.BUFFER, step, places[name]) if known else None

        case = self._ingredients.case
        return GhostBatch(
            self._model,
            stretches,
            buffers_of,
            keep_outputs=keep_outputs,
            exchanges_itself=trained_with(case.adaptation.form) == case.workload,
        )

    def distance_from_single_batch(self, step: int, ghost: FullBatch) -> float:
        """Return the relative L2 distance, over all parameters, between a ghost batch's gradient
        and the gradient of the full batch with a single normalization.
        """
        true, seen = self._flatten(self.run(step, ghost=False)), self._flatten(ghost)
        return float((seen - true).norm() / true.norm())

    @staticmethod
    def _flatten(result: FullBatch) -> torch.Tensor:
        return torch.cat([g.double().flatten() for g in result.gradients if g is not None])
