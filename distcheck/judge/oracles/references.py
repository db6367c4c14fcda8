"""Reference computations, built once per process, and one recorded step as input of the oracle
layers.

Results that several layers need at a step (the ranks' shards, the full batch) are computed once, on
demand, and freed with the step. Checks receive only the layers' results.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self, TypeVar

import msgspec
import torch
import xxhash
from torch import nn

from distcheck.contract import Contract
from distcheck.judge.acceptance import AcceptedDeviation, parse_deviation
from distcheck.judge.oracles.design import Design, ParameterDesign, make_design
from distcheck.judge.oracles.forms import Gradients
from distcheck.judge.oracles.full_batch import FullBatch, FullBatchReference, module_scales
from distcheck.judge.oracles.own_rounding import OwnRounding
from distcheck.judge.oracles.shards import (
    NotRecordedError,
    ShardReference,
    ShardResult,
    StepReference,
    all_finite,
    load_state,
    loss_scale,
)
from distcheck.judge.oracles.shares import Shares
from distcheck.machine import seeds
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records.expected_events import NonfiniteGradient
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64
from distcheck.training.adapters.forms import trained_with
from distcheck.training.building import Ingredients, recorded_parameters, state_tensors
from distcheck.training.optimizers import is_group_number, restore_state_value, set_implementation


class UpdateReference(StepReference):
    """Runs the workload's optimizer, created with the parameters that ranks can train."""

    @property
    def world(self) -> int:
        return self._trace.layout.world

    def is_sharded(self, index: int) -> bool:
        """Return True if only one rank holds a state tensor; numbers of groups are on all ranks."""
        name = self._trace.layout.model.optimizer[index].name
        return self._contract.optimizer_state == "sharded" and not is_group_number(name)

    def holders(self, slot: int, index: int) -> list[int]:
        ranks = range(self._trace.layout.world)
        entries = [self._trace.entry(rank, Kind.OPTIMIZER, slot, index) for rank in ranks]
        return [rank for rank, entry in zip(ranks, entries, strict=True) if entry.state.is_there]

    def _source(self, rank: int, kind: Kind, slot: int, index: int) -> int:
        """Return the rank to read a tensor from: itself, or the one that holds it for all."""
        if kind is not Kind.OPTIMIZER or not self.is_sharded(index):
            return rank
        return next(iter(self.holders(slot, index)), rank)

    @property
    def decays_parameters(self) -> bool:
        """Return True if the optimizer's update depends on the parameters' values."""
        parameters, one_group = self._model.parameters(), self._contract.one_group
        optimizer = self._ingredients.optimizer(parameters, one_group=one_group)
        return any(group.get("weight_decay") for group in optimizer.param_groups)

    def input_digest(self, rank: int, step: int) -> bytes:
        """Return a digest of all inputs of the update; ranks with equal digests share a result."""
        layout, digest = self._trace.layout, xxhash.xxh3_128()
        for kind in (Kind.GRADIENT, Kind.PARAMETER, Kind.OPTIMIZER):
            for index in range(len(layout.specs(kind))):
                source = self._source(rank, kind, step, index)
                entry = self._trace.entry(source, kind, step, index)
                digest.update(entry.digest + bytes([entry.state]))
        return digest.digest()

    def run(
        self, rank: int, step: int, *, absent: Collection[int] = (), clip_factor: float = 1.0
    ) -> dict[Kind, list[torch.Tensor | None]]:
        """Return parameters and optimizer state after the step, in layout order.

        Parameters with an index in `absent` have no gradient, whatever was recorded. If the loop
        clips, it clips to `clip_factor` times the norm. Raises NotRecordedError if the trace lacks
        the values before the update.
        """
        trace, model = self._trace, self._model
        load_state(model, trace, rank=rank, buffers_of=rank, step=step)
        parameters = dict(recorded_parameters(model))
        for index, (name, parameter) in enumerate(parameters.items()):
            if trace.entry(rank, Kind.GRADIENT, step, index).state is EntryState.UNWRITTEN:
                raise NotRecordedError(f"rank {trace.ranks[rank]} recorded no gradient of {name}")
            gradient = trace.tensor(rank, Kind.GRADIENT, step, index)
            gradient = None if index in absent else gradient
            parameter.requires_grad_(self._trains[index])
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer = self._ingredients.optimizer(
            model.parameters(), one_group=self._contract.one_group
        )
        header = trace.header(rank, step)
        set_implementation(optimizer, header.implementation)
        for index, spec in enumerate(trace.layout.model.optimizer):
            source = self._source(rank, Kind.OPTIMIZER, step, index)
            before = trace.tensor(source, Kind.OPTIMIZER, step, index)
            if before is not None:
                is_number = spec.name in trace.layout.model.numbers
                restore_state_value(optimizer, parameters, spec.name, before, is_number=is_number)
        self._ingredients.schedule(optimizer, step)
        training = self._ingredients.training
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm * clip_factor)
        if training.loss_scale is None or all_finite(trace, rank, step):
            with seeds.under(header.settings):
                optimizer.step()
        state = state_tensors(model, optimizer, trace.layout.model)
        return {
            # Copies: the next rank's update is computed in the same model.
            Kind.PARAMETER: [p.detach().clone() for p in parameters.values()],
            Kind.OPTIMIZER: [state.get(s.name) for s in trace.layout.model.optimizer],
        }


Made = TypeVar("Made")


def _mean(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.stack(there).sum(0) / len(parts) if there else None


class _Keeping:
    """An object to which layers attach their results."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def kept(self, make: Callable[[Self], Made]) -> Made:
        """Return the result of `make`, computed once per step or per references."""
        if make not in self._kept:
            self._kept[make] = make(self)
        made: Made = self._kept[make]
        return made


class References(_Keeping):
    """All references of a case. `whole` is the trace of all ranks. Steps have only the ranks with
    data; in a `mesh`, only one rank per data coordinate.
    """

    def __init__(self, ingredients: Ingredients, contract: Contract, whole: TraceReader) -> None:
        super().__init__()
        self.ingredients, self._promised, self.whole = ingredients, contract, whole
        self.mesh = contract.mesh(whole.layout.world)
        readers = ingredients.case.with_data if self.mesh is None else self.mesh.readers
        self.trace = whole.of_ranks(readers)

    @cached_property
    def unpromised(self) -> bool:
        """Return True if a strategy's backward split its shards without a promise to do so."""
        return self._promised.micro_batches == 1 and self._stretches > 1

    @cached_property
    def contract(self) -> Contract:
        """The contract, with the observed number of micro-batches if none is promised."""
        if not self.unpromised:
            return self._promised
        return msgspec.structs.replace(self._promised, micro_batches=self._stretches)

    @cached_property
    def _stretches(self) -> int:
        """The number of micro-batches in the first step, if equal on all ranks."""
        counts = {self.trace.header(rank, 0).stretches for rank in range(self.trace.layout.world)}
        return counts.pop() if len(counts) == 1 else 1

    def at(self, step: int) -> "AtStep":
        """Return a step. Nothing is computed yet."""
        return AtStep(self, step)

    @cached_property
    def holding(self) -> tuple[int, ...]:
        """The ranks that must hold the mean gradient: ranks with data, and ranks without data whose
        zero gradients ever changed. A server that keeps the mean must hold the right one; a server
        that only forwards it has nothing to compare.
        """
        if self.mesh is not None:
            return tuple(range(self.mesh.world))
        with_data = self.ingredients.case.with_data
        return tuple(
            rank
            for rank in range(self.whole.layout.world)
            if rank in with_data or self._ever_held(rank)
        )

    def _ever_held(self, rank: int) -> bool:
        return any(
            tensor is not None and bool(tensor.any())
            for step in range(self.whole.steps_written())
            for tensor in self.whole.tensors(rank, Kind.GRADIENT, step)
        )

    @cached_property
    def _model(self) -> nn.Module:
        """One model for all references, each of which loads its own state."""
        seeds.pin_determinism()
        model = self.ingredients.model()
        self._trains = [
            p.requires_grad for _, p in recorded_parameters(model)
        ]  # a step may change that
        return model

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters of the model as built, for memory layouts; values were loaded last."""
        return [
            parameter.detach().requires_grad_(trains)
            for (_, parameter), trains in zip(
                recorded_parameters(self._model), self._trains, strict=True
            )
        ]

    @cached_property
    def shards(self) -> ShardReference:
        return ShardReference(self.ingredients, self.contract, self.trace, self._model)

    @cached_property
    def full_batch(self) -> FullBatchReference:
        return FullBatchReference(self.ingredients, self.contract, self.trace, self._model)

    @cached_property
    def in_double(self) -> "References":
        """The same references in float64, starting from the recorded state."""
        ingredients = replace(self.ingredients, dtype=torch.float64)
        return References(ingredients, self.contract, self.whole)

    @cached_property
    def update(self) -> UpdateReference:
        """The reference of the optimizer step; in a mesh, for every rank."""
        model, trace = self._model, self.trace if self.mesh is None else self.whole
        return UpdateReference(self.ingredients, self.contract, trace, model, self._trains)

    @cached_property
    def design(self) -> Design | None:
        """The accepted design, if it replaces an expectation."""
        return make_design(self, parse_deviation(self.ingredients.case.accept))

    @property
    def parameter_design(self) -> ParameterDesign | None:
        """The accepted design, if ranks step locally and combine parameters."""
        return self.design if isinstance(self.design, ParameterDesign) else None


class AtStep(_Keeping):
    """The ranks' computations at `step`, repeated from their recorded previous state."""

    def __init__(self, references: References, step: int) -> None:
        super().__init__()
        self.references, self.step = references, step
        self.ingredients, self.contract = references.ingredients, references.contract
        self.trace = references.trace
        self.case, self.training = self.ingredients.case, self.ingredients.training
        self.specs = self.trace.layout.model.parameters

    @cached_property
    def shares(self) -> Shares:
        ranks = range(self.trace.layout.world)
        return Shares(
            step=self.step,
            ranks=tuple(self.trace.ranks),
            headers=tuple(self.trace.header(rank, self.step) for rank in ranks),
            contract=self.contract,
            loss=self.contract.loss_given(self.case.loss),
            loss_scales=tuple(
                loss_scale(self.ingredients, self.trace, rank, self.step) for rank in ranks
            ),
        )

    @cached_property
    def shards(self) -> tuple[ShardResult, ...]:
        ranks = range(self.trace.layout.world)
        return tuple(self.references.shards.run(rank, self.step) for rank in ranks)

    @property
    def shard_gradients(self) -> tuple[Gradients, ...]:
        """The expected local gradients of every rank."""
        return tuple(tuple(shard.gradients) for shard in self.shards)

    @property
    def recomputed_if_unrecorded(self) -> tuple[Gradients, ...]:
        """Local gradients of every rank, if the trace lacks one; otherwise empty."""
        trace, ranks = self.trace, range(self.trace.layout.world)
        seen = all(
            gradient is not None
            for rank in ranks
            for gradient in trace.tensors(rank, Kind.LOCAL_GRADIENT, self.step)
        )
        return () if seen else self.shard_gradients

    @property
    def communicating_form(self) -> str:
        """The form of code that is itself trained and communicates in forward, or ""."""
        form = self.case.adaptation.form or ""
        return form if trained_with(form) == self.case.workload else ""

    @cached_property
    def unexchanged(self) -> tuple[Gradients, ...]:
        """The ranks' results if such code did not communicate: for a loss, the mean of the
        gradients for each rank's samples; for a metric, the result of each rank.
        """
        if self.communicating_form == "metric":
            return self.shard_gradients
        means = [_mean(parts) for parts in zip(*self.shard_gradients, strict=True)]
        return (tuple(means),) * len(self.shard_gradients)

    @cached_property
    def full_batch(self) -> FullBatch:
        return self.references.full_batch.run(self.step)

    @cached_property
    def own_rounding(self) -> OwnRounding:
        return OwnRounding(self.references.full_batch, self.step, self.full_batch)

    @cached_property
    def module_scales(self) -> dict[str, float]:
        return module_scales([spec.name for spec in self.specs], self.full_batch.gradients)

    @cached_property
    def in_double(self) -> "AtStep":
        """The same step in float64, starting from the recorded state."""
        return self.references.in_double.at(self.step)

    @property
    def accepted(self) -> AcceptedDeviation | None:
        return parse_deviation(self.case.accept)

    @property
    def full_batch_layer(self) -> str:
        """The layer for the full batch in the step's dtype: float32 or float64."""
        return IN_FLOAT64 if self.ingredients.dtype is torch.float64 else IN_FLOAT32

    @property
    def nan_is_expected(self) -> bool:
        """Return True if the workload declares gradients that are not finite. In any other
        workload, NaN is an error and compares as unequal.
        """
        return any(isinstance(event, NonfiniteGradient) for event in self.ingredients.must_happen)

    def recorded_gradients(self, index: int) -> list[torch.Tensor]:
        """Return a gradient on ranks that must hold the mean, one for each bit pattern."""
        whole, found = self.references.whole, dict[bytes, torch.Tensor]()
        for rank in self.references.holding:
            entry = whole.entry(rank, Kind.GRADIENT, self.step, index)
            tensor = whole.tensor(rank, Kind.GRADIENT, self.step, index)
            if tensor is not None:
                found.setdefault(entry.digest, tensor)
        return list(found.values())
