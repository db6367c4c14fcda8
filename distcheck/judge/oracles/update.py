"""The optimizer step of one rank, again, from the gradients and the state that it recorded."""

from collections.abc import Collection

import torch
import xxhash

from distcheck.judge.oracles.shards import NotRecordedError, StepReference, all_finite, load_state
from distcheck.machine import seeds
from distcheck.recordings.recording import EntryState, Kind
from distcheck.training.building import state_tensors, trainable
from distcheck.training.optimizers import implement, is_of_group, put_back


class UpdateReference(StepReference):
    """Steps the workload's optimizer, which meets the parameters that train as the ranks' did."""

    @property
    def world(self) -> int:
        return self._trace.layout.world

    def is_sharded(self, index: int) -> bool:
        """Whether one rank alone holds it; numbers of an optimizer's groups are on every rank."""
        name = self._trace.layout.model.optimizer[index].name
        return self._contract.optimizer_state == "sharded" and not is_of_group(name)

    def holders(self, slot: int, index: int) -> list[int]:
        ranks = range(self._trace.layout.world)
        entries = [self._trace.entry(rank, Kind.OPTIMIZER, slot, index) for rank in ranks]
        return [rank for rank, entry in zip(ranks, entries, strict=True) if entry.state.is_there]

    def _source(self, rank: int, kind: Kind, slot: int, index: int) -> int:
        """The rank to take a tensor from: its own, unless another one holds it for all."""
        if kind is not Kind.OPTIMIZER or not self.is_sharded(index):
            return rank
        return next(iter(self.holders(slot, index)), rank)

    def input_digest(self, rank: int, step: int) -> bytes:
        """A digest of all that the update depends on: ranks that share it share the result."""
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
        """Parameters and optimizer state after the step, in the layout's order. Parameters whose
        index is in `absent` have no gradient, whatever was recorded; where the loop clips, it does
        so to `clip_factor` times the norm.

        Raises NotRecordedError where the trace lacks what the update starts from.
        """
        trace, model = self._trace, self._model
        load_state(model, trace, rank=rank, buffers_of=rank, step=step)
        parameters = dict(trainable(model))
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
        implement(optimizer, header.implementation)
        for index, spec in enumerate(trace.layout.model.optimizer):
            source = self._source(rank, Kind.OPTIMIZER, step, index)
            before = trace.tensor(source, Kind.OPTIMIZER, step, index)
            if before is not None:
                is_number = spec.name in trace.layout.model.numbers
                put_back(optimizer, parameters, spec.name, before, is_number=is_number)
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
