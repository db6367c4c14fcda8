"""What computes steps again, built once per process, and the steps that are computed with it."""

from dataclasses import replace
from functools import cached_property

import msgspec
import torch
from torch import nn

from distcheck.contract import Contract
from distcheck.judge.acceptance import read
from distcheck.judge.oracles.at_step import AtStep
from distcheck.judge.oracles.averaging import Averages
from distcheck.judge.oracles.closed_form import ClosedForm
from distcheck.judge.oracles.full_batch import FullBatchReference
from distcheck.judge.oracles.holding import ranks_that_hold
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shards import ShardReference
from distcheck.judge.oracles.update import UpdateReference
from distcheck.machine import seeds
from distcheck.recordings.traces.reader import TraceReader
from distcheck.training.building import Ingredients, trainable


class References:
    """One of each. `whole` is the trace of all ranks; steps are those of the ranks with data, as if
    they were all that there are. In a `mesh` they are those of one rank of each data coordinate.
    """

    def __init__(self, ingredients: Ingredients, contract: Contract, whole: TraceReader) -> None:
        self.ingredients, self._promised, self.whole = ingredients, contract, whole
        self.mesh = contract.mesh(whole.layout.world)
        readers = ingredients.case.with_data if self.mesh is None else self.mesh.readers
        self.trace = whole.of_ranks(readers)
        # R by step and parameter, kept for steps that come after it.
        self.intervals: dict[int, list[Interval | None]] = {}

    @cached_property
    def unpromised(self) -> bool:
        """Whether a strategy's own backward was seen to cut its shards, and promises not to."""
        return self._promised.micro_batches == 1 and self._stretches > 1

    @cached_property
    def contract(self) -> Contract:
        """What the strategy promises, with the micro-batches that were seen where it promises
        nothing about them.
        """
        if not self.unpromised:
            return self._promised
        return msgspec.structs.replace(self._promised, micro_batches=self._stretches)

    @cached_property
    def _stretches(self) -> int:
        """How many, in the first step, if all ranks have as many."""
        counts = {self.trace.header(rank, 0).stretches for rank in range(self.trace.layout.world)}
        return counts.pop() if len(counts) == 1 else 1

    def at(self, step: int) -> AtStep:
        """A step, of which nothing is computed yet."""
        return AtStep(self, step)

    @cached_property
    def holding(self) -> tuple[int, ...]:
        """The ranks of the whole trace that must hold the mean gradient."""
        if self.mesh is not None:
            return tuple(range(self.mesh.world))
        return ranks_that_hold(self.whole, self.ingredients.case.with_data)

    @cached_property
    def _model(self) -> nn.Module:
        """One model for all: each reference loads the state that it starts from."""
        seeds.pin_determinism()
        model = self.ingredients.model()
        self._trains = [p.requires_grad for _, p in trainable(model)]  # a step may change that
        return model

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        """Of the model as it was built: how they lie in memory, and which of them train. Their
        values are those that were loaded last.
        """
        return [
            parameter.detach().requires_grad_(trains)
            for (_, parameter), trains in zip(trainable(self._model), self._trains, strict=True)
        ]

    @cached_property
    def shards(self) -> ShardReference:
        """For the ranks' own parts."""
        return ShardReference(self.ingredients, self.contract, self.trace, self._model)

    @cached_property
    def full_batch(self) -> FullBatchReference:
        """For the whole batch."""
        return FullBatchReference(self.ingredients, self.contract, self.trace, self._model)

    @cached_property
    def in_double(self) -> "References":
        """The same in float64, from the state that was recorded."""
        ingredients = replace(self.ingredients, dtype=torch.float64)
        return References(ingredients, self.contract, self.whole)

    @cached_property
    def update(self) -> UpdateReference:
        """For the optimizer's step; in a mesh, that of every rank."""
        model, trace = self._model, self.trace if self.mesh is None else self.whole
        return UpdateReference(self.ingredients, self.contract, trace, model, self._trains)

    @cached_property
    def averages(self) -> Averages | None:
        """When parameters are averaged, where local SGD is accepted."""
        accepted = read(self.ingredients.case.accept)
        if accepted is None or accepted.family != "local-sgd":
            return None
        return Averages.seen_in(self.trace, accepted.amount)

    @cached_property
    def closed_form(self) -> ClosedForm:
        """The lattice's own training."""
        return ClosedForm(self.at(0))
