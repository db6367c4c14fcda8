"""The optimizer step of one rank, again, from the gradients and the state that it recorded."""

import torch
import xxhash

from distcheck.oracles.shards import load_state
from distcheck.ranks.training import Ingredients, state_tensors, trainable
from distcheck.traces.layout import Kind
from distcheck.traces.reader import TraceReader


class UpdateReference:
    """Steps the workload's optimizer on `model`, whose state it overwrites."""

    def __init__(
        self, ingredients: Ingredients, trace: TraceReader, model: torch.nn.Module
    ) -> None:
        self._ingredients, self._trace, self._model = ingredients, trace, model

    def input_digest(self, rank: int, step: int) -> bytes:
        """A digest of all that the update depends on: ranks that share it share the result."""
        layout, digest = self._trace.layout, xxhash.xxh3_128()
        for kind in (Kind.GRADIENT, Kind.PARAMETER, Kind.OPTIMIZER):
            for index in range(len(layout.specs(kind))):
                entry = self._trace.entry(rank, kind, step, index)
                digest.update(entry.digest + bytes([entry.state]))
        return digest.digest()

    def run(self, rank: int, step: int) -> dict[Kind, list[torch.Tensor | None]]:
        """Parameters and optimizer state after the step, in the layout's order.

        Raises NotRecordedError where the trace lacks what the update starts from.
        """
        trace, model = self._trace, self._model
        load_state(model, trace, rank=rank, buffers_of=rank, step=step)
        parameters = dict(trainable(model))
        for index, parameter in enumerate(parameters.values()):
            gradient = trace.tensor(rank, Kind.GRADIENT, step, index)
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer = self._ingredients.loaded.workload.optimizer(model.parameters())
        for index, spec in enumerate(trace.layout.model.optimizer):
            name, _, key = spec.name.rpartition("/")
            before = trace.tensor(rank, Kind.OPTIMIZER, step, index)
            if before is not None:
                optimizer.state[parameters[name]][key] = before.clone()
        optimizer.step()
        state = dict(state_tensors(model, optimizer))
        return {
            Kind.PARAMETER: [p.detach() for p in parameters.values()],
            Kind.OPTIMIZER: [state.get(s.name) for s in trace.layout.model.optimizer],
        }
