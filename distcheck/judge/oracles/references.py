"""What the expectations of all steps are computed with."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from distcheck.contract import Contract
from distcheck.judge.acceptance import read
from distcheck.judge.oracles.averaging import Averages
from distcheck.judge.oracles.full_batch import FullBatchReference
from distcheck.judge.oracles.inexact_sums import Standing
from distcheck.judge.oracles.lattice import LatticeOracle, LatticeStep
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shards import ShardReference, declared_factor
from distcheck.judge.oracles.update import UpdateReference
from distcheck.machine import seeds
from distcheck.training.building import Ingredients, trainable
from distcheck.training.traces.reader import TraceReader


class References:
    """One of each, built once per process."""

    def __init__(self, ingredients: Ingredients, contract: Contract, trace: TraceReader) -> None:
        self.ingredients, self._contract, self._trace = ingredients, contract, trace
        self._lattice: list[LatticeStep] = []
        # R by step and parameter, kept for steps that come after it.
        self.intervals: dict[int, list[Interval | None]] = {}
        # What the lattice's gradients are, by step: see inexact_sums.
        self.standings: dict[int, Standing] = {}

    @cached_property
    def _model(self) -> nn.Module:
        """One model for all: each reference loads the state that it starts from."""
        seeds.pin_determinism()
        model = self.ingredients.model()
        self._trains = [p.requires_grad for _, p in trainable(model)]  # a step may change that
        return model

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        """Of the model as it was built; their values are those that were loaded last."""
        return [
            parameter.detach().requires_grad_(trains)
            for (_, parameter), trains in zip(trainable(self._model), self._trains, strict=True)
        ]

    @cached_property
    def shards(self) -> ShardReference:
        """For X and R."""
        return ShardReference(self.ingredients, self._contract, self._trace, self._model)

    @cached_property
    def full_batch(self) -> FullBatchReference:
        """For S32 and S64."""
        return FullBatchReference(self.ingredients, self._contract, self._trace, self._model)

    @cached_property
    def in_double(self) -> "References":
        """The same in float64, from the state that was recorded."""
        ingredients = replace(self.ingredients, dtype=torch.float64)
        return References(ingredients, self._contract, self._trace)

    @cached_property
    def update(self) -> UpdateReference:
        """For the optimizer's step."""
        model = self._model
        return UpdateReference(self.ingredients, self._contract, self._trace, model, self._trains)

    @cached_property
    def averages(self) -> Averages | None:
        """When parameters are averaged, where local SGD is accepted."""
        accepted = read(self.ingredients.case.accept)
        if accepted is None or accepted.family != "local-sgd":
            return None
        return Averages(self._trace, accepted.amount)

    @cached_property
    def _lattice_oracle(self) -> LatticeOracle:
        return LatticeOracle(self._contract, self.ingredients.case.dtype)

    def lattice_step(self, step: int) -> LatticeStep:
        """The lattice trains on from its own beginning, so earlier steps come first."""
        world = self._trace.layout.world
        while len(self._lattice) <= step:
            done = len(self._lattice)
            headers = [self._trace.header(rank, done) for rank in range(world)]
            ids = [h.ids for h in headers]
            total = sum(map(len, ids))
            loss = self.ingredients.case.loss
            factors = [
                h.loss_factor * declared_factor(loss, len(h.ids), total, headers) for h in headers
            ]
            self._lattice.append(self._lattice_oracle.step(ids, factors))
        return self._lattice[step]
