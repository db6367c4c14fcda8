"""S64 and S32: the whole batch of a step, forward and backward once, in one process.

This is what "single-node training at equal total batch size" means, and it shares no arithmetic
with the shards: other kernels' blocking, other sums. So it agrees only up to rounding.

BatchNorm is the exception. Shards that normalise on their own do not train the model that one
machine would, whatever the sync does; the expectation is then the *ghost batch* (Hoffer, Hubara
and Soudry, arXiv:1705.08741): one pass over the whole batch in which BatchNorm normalises each
shard's stretch by itself. How far that is from true full-batch training is measured and said.

Tolerance, per tensor: the L2 norm of the difference is at most

    relative * the largest norm(expected) among the tensors of the same module

S64  relative = 1e-11. Correct code was measured at up to 2e-14 (VGG11, ghost batch); the rest is
     room for deeper networks, and still a millionth of the smallest error that matters.
S32  relative = u * sqrt(N * 1024), u = 2^-24: the rounding error of a sum of N images x 32 x 32
     positions, the longest that the shipped workloads add up, grows like the root of its
     length (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, at lambda = 1): 3.1e-5 for 256
     images. Correct code was measured at up to 1.1e-5.

The module's largest tensor sets the scale because a tensor's own norm may be rounding noise: the
exact gradient of a bias in front of BatchNorm is zero. It is the sum of the same cotangents that
enter the weight's gradient, so its error is of the size of the weight's, not of its own. (Against
the weight's norm, correct code was measured at up to 2e-6 in float32.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distcheck.contract import Contract
from distcheck.oracles.rounding import real_parts, unit_roundoff
from distcheck.oracles.shards import load_state, stretch_sizes
from distcheck.ranks.training import Ingredients, dense, trainable
from distcheck.traces.reader import TraceReader

_POSITIONS = 32 * 32
_S64_RELATIVE = 1e-11
_LOSS_RELATIVE = {"S32": 1e-6, "S64": 1e-13}  # a loss is one mean of N: far fewer roundings


@dataclass(frozen=True)
class FullBatch:
    """The batch's mean loss and gradients; None where a parameter has none."""

    loss: float
    gradients: list[torch.Tensor | None]


def relative_tolerance(layer: str, batch: int) -> float:
    """The relative L2 tolerance of a layer; see the module's text."""
    if layer == "S64":
        return _S64_RELATIVE
    return unit_roundoff(torch.float32) * sqrt(batch * _POSITIONS)


def module_scales(
    names: Sequence[str], gradients: Sequence[torch.Tensor | None]
) -> dict[str, float]:
    """Per module (a parameter's name up to its last dot): the largest norm of a gradient in it."""
    scales: dict[str, float] = {}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            module = name.rpartition(".")[0]
            scales[module] = max(scales.get(module, 0.0), norm(gradient))
    return scales


def norm(tensor: torch.Tensor) -> float:
    """The L2 norm, in float64; a complex number counts with both of its parts."""
    return float(real_parts(tensor).double().norm())


def loss_tolerance(layer: str, expected: float) -> float:
    """The most by which the mean loss over all ranks may differ."""
    return _LOSS_RELATIVE[layer] * abs(expected)


class FullBatchReference:
    """Runs whole batches on `model`, whose state it overwrites."""

    def __init__(
        self,
        ingredients: Ingredients,
        contract: Contract,
        trace: TraceReader,
        model: nn.Module,
    ) -> None:
        self._ingredients, self._contract, self._trace = ingredients, contract, trace
        self._model = model

    @property
    def normalises_batches(self) -> bool:
        """Whether the model has BatchNorm, so that shards cannot equal the full batch."""
        return any(isinstance(module, _BatchNorm) for module in self._model.modules())

    def normalised_sizes(self, shards: Sequence[int]) -> list[int]:
        """The stretches that BatchNorm sees by themselves: shards, or their micro-batches."""
        count = self._contract.micro_batches * self._ingredients.training.accumulate
        return [size for samples in shards for size in stretch_sizes(samples, count)]

    def run(self, step: int, *, ghost: bool = True) -> FullBatch:
        """The batch of one step, from rank 0's state; shards one after the other.

        `ghost=False` lets BatchNorm see the whole batch, as one machine would.
        """
        trace = self._trace
        shards = [trace.header(rank, step).ids for rank in range(trace.layout.world)]
        ids = torch.tensor([i for shard in shards for i in shard], dtype=torch.int64)
        load_state(self._model, trace, rank=0, buffers_of=0, step=step)
        self._ingredients.prepare(self._model, step)
        batch = self._ingredients.batch(ids, len(ids))
        sizes = self.normalised_sizes([len(s) for s in shards]) if ghost else [len(ids)]
        with _ghost_batches(self._model, sizes):
            loss = self._ingredients.loaded.workload.loss(self._model, batch)
            loss.backward()
        return FullBatch(
            loss=float(loss.detach()),
            gradients=[dense(p.grad) for _, p in trainable(self._model)],
        )

    def distance_from_true(self, step: int, ghost: FullBatch) -> float:
        """Relative L2 distance, over all parameters, of a ghost batch's gradient from that of
        the full batch as one machine would normalise it.
        """
        true, seen = self._flat(self.run(step, ghost=False)), self._flat(ghost)
        return float((seen - true).norm() / true.norm())

    @staticmethod
    def _flat(result: FullBatch) -> torch.Tensor:
        return torch.cat([g.double().flatten() for g in result.gradients if g is not None])


@contextmanager
def _ghost_batches(model: nn.Module, sizes: list[int]) -> Iterator[None]:
    """Has every BatchNorm normalise each stretch of the batch by itself.

    Running statistics are left alone: they do not enter a training step.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        layer.forward = _ghost_forward(layer, sizes)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _ghost_forward(layer: _BatchNorm, sizes: list[int]):  # type: ignore[no-untyped-def]
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        parts = [
            F.batch_norm(part, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
            for part in inputs.split(sizes)
        ]
        return torch.cat(parts)

    return forward
