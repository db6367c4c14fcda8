"""All expectations of one step, each computed when a check first asks for it."""

import math
from functools import cached_property

import torch
from torch import nn

from distcheck import seeds
from distcheck.contract import Contract
from distcheck.oracles import order_exact, rounding
from distcheck.oracles.full_batch import (
    FullBatch,
    FullBatchReference,
    module_scales,
    relative_tolerance,
)
from distcheck.oracles.lattice import LatticeOracle, LatticeStep
from distcheck.oracles.rounding import Interval
from distcheck.oracles.shards import ShardReference, ShardResult
from distcheck.oracles.update import UpdateReference
from distcheck.ranks.training import Ingredients
from distcheck.traces.reader import StepHeader, TraceReader


class StepExpectation:
    """What should have been at `step`, given what the ranks recorded before it."""

    def __init__(
        self,
        ingredients: Ingredients,
        contract: Contract,
        trace: TraceReader,
        references: "References",
        step: int,
    ) -> None:
        self.ingredients, self.contract, self.trace = ingredients, contract, trace
        self.step = step
        self._references = references

    @cached_property
    def headers(self) -> list[StepHeader]:
        """The ranks' headers."""
        return [self.trace.header(r, self.step) for r in range(self.trace.layout.world)]

    @cached_property
    def weights(self) -> list[float]:
        """The ranks' sample weights n_r * W / N: 1.0 for equal shards."""
        sizes = [len(header.ids) for header in self.headers]
        return [size * len(sizes) / sum(sizes) for size in sizes]

    @cached_property
    def shards(self) -> list[ShardResult]:
        """Every rank's own part, computed again."""
        run = self._references.shards.run
        return [run(rank, self.step) for rank in range(self.trace.layout.world)]

    @cached_property
    def order_exact(self) -> list[torch.Tensor | None]:
        """X: the synchronised gradients to the bit."""
        return order_exact.expected_gradients(
            self.contract,
            self.ingredients.case.backend,
            [shard.gradients for shard in self.shards],
            weights=self.weights,
            step=self.step,
            ready_order=self.trace.header(0, 0).ready_order,
        )

    def interval(self, index: int) -> Interval | None:
        """R: mean and bound of one parameter's gradient; None where no rank has a gradient."""
        parts = [shard.gradients[index] for shard in self.shards]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        filled = [torch.zeros_like(present[0]) if part is None else part for part in parts]
        scaled = any(factor != 1.0 for factor in self._loss_factors)
        return rounding.interval(filled, self._shares, rescaled=scaled)

    @property
    def _loss_factors(self) -> list[float]:
        """What the ranks' shard gradients are multiplied by, without a promise to say so."""
        observed = self.contract.observes_loss
        return [header.loss_factor if observed else 1.0 for header in self.headers]

    @property
    def _shares(self) -> list[float]:
        """What each rank's shard gradient counts for in the mean over all samples."""
        world = len(self.weights)
        if self.contract.weighting == "loss":
            return [1.0 / world] * world
        pairs = zip(self.weights, self._loss_factors, strict=True)
        return [weight / factor / world if factor else math.nan for weight, factor in pairs]

    def buffers(self, rank: int) -> list[list[torch.Tensor]]:
        """What a rank's buffers may be after the step: one way, or two where none is promised."""
        ways = [self.shards[rank].buffers]
        if self.contract.takes_any_buffers and rank != 0:
            ways.append(self._references.shards.run(rank, self.step, buffers_of=0).buffers)
        return ways

    @cached_property
    def full_batch(self) -> FullBatch:
        """S32, S64: the whole batch in one process."""
        return self._references.full_batch.run(self.step)

    @cached_property
    def _module_scales(self) -> dict[str, float]:
        names = [spec.name for spec in self.trace.layout.model.parameters]
        return module_scales(names, self.full_batch.gradients)

    def full_batch_tolerance(self, layer: str, name: str) -> float:
        """S32, S64: the most by which a parameter's gradient may differ, as an L2 norm."""
        samples = sum(len(header.ids) for header in self.headers)
        scale = self._module_scales.get(name.rpartition(".")[0], 0.0)
        return relative_tolerance(layer, samples) * scale

    @property
    def update(self) -> UpdateReference:
        """The optimizer's step, again, for any rank."""
        return self._references.update

    @property
    def normalises_batches(self) -> bool:
        """Whether the full batch is a ghost batch, because the model has BatchNorm."""
        return self._references.full_batch.normalises_batches

    def ghost_distance(self) -> float:
        """How far the ghost batch's gradient is from that of true full-batch training."""
        return self._references.full_batch.distance_from_true(self.step, self.full_batch)

    @cached_property
    def lattice(self) -> LatticeStep:
        """The lattice's closed form. Raises HeadroomError."""
        return self._references.lattice_step(self.step)


class References:
    """What expectations are computed with, built once per process."""

    def __init__(self, ingredients: Ingredients, contract: Contract, trace: TraceReader) -> None:
        self._ingredients, self._contract, self._trace = ingredients, contract, trace
        self._lattice: list[LatticeStep] = []

    @cached_property
    def _model(self) -> nn.Module:
        """One model for all: each reference loads the state that it starts from."""
        seeds.pin_determinism()
        return self._ingredients.model()

    @cached_property
    def shards(self) -> ShardReference:
        """For X and R."""
        return ShardReference(self._ingredients, self._contract, self._trace, self._model)

    @cached_property
    def full_batch(self) -> FullBatchReference:
        """For S32 and S64."""
        return FullBatchReference(self._ingredients, self._trace, self._model)

    @cached_property
    def update(self) -> UpdateReference:
        """For the optimizer's step."""
        return UpdateReference(self._ingredients, self._trace, self._model)

    @cached_property
    def _lattice_oracle(self) -> LatticeOracle:
        return LatticeOracle(self._contract, self._ingredients.case.dtype)

    def lattice_step(self, step: int) -> LatticeStep:
        """The lattice trains on from its own beginning, so earlier steps come first."""
        world = self._trace.layout.world
        while len(self._lattice) <= step:
            done = len(self._lattice)
            headers = [self._trace.header(rank, done) for rank in range(world)]
            ids, factors = [h.ids for h in headers], [h.loss_factor for h in headers]
            self._lattice.append(self._lattice_oracle.step(ids, factors))
        return self._lattice[step]
