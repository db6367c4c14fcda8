"""Each rank's own part of a step, computed again in one process from the state it recorded."""

from dataclasses import dataclass

import torch

from distcheck.contract import Contract
from distcheck.ranks.training import Ingredients, trainable
from distcheck.traces.layout import Kind
from distcheck.traces.reader import TraceReader


class NotRecordedError(Exception):
    """The trace lacks something that an expectation starts from."""


@dataclass(frozen=True)
class ShardResult:
    """One rank's shard: mean loss, gradients per parameter, buffers after the forward pass."""

    loss: float
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]


def load_state(
    model: torch.nn.Module, trace: TraceReader, *, rank: int, buffers_of: int, step: int
) -> None:
    """Puts the model where `rank` was before `step`, with the buffers of rank `buffers_of`."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(trainable(model)):
            recorded = trace.tensor(rank, Kind.PARAMETER, step, index)
            if recorded is None:
                raise NotRecordedError(f"rank {rank} has no {name} before step {step}")
            parameter.copy_(recorded)
            parameter.grad = None
        for index, (name, buffer) in enumerate(model.named_buffers()):
            recorded = trace.tensor(buffers_of, Kind.BUFFER, step, index)
            if recorded is None:
                raise NotRecordedError(f"rank {buffers_of} has no {name} before step {step}")
            buffer.copy_(recorded)


class ShardReference:
    """Runs shards one after the other on `model`, whose state it overwrites."""

    def __init__(
        self,
        ingredients: Ingredients,
        contract: Contract,
        trace: TraceReader,
        model: torch.nn.Module,
    ) -> None:
        self._ingredients, self._contract, self._trace = ingredients, contract, trace
        self._model = model

    def run(self, rank: int, step: int, *, buffers_of: int | None = None) -> ShardResult:
        """One rank's forward and backward at one step, from its own buffers or another's (by
        default as the contract has it). Raises NotRecordedError.
        """
        headers = [self._trace.header(r, step) for r in range(self._trace.layout.world)]
        header = headers[rank]
        total = sum(len(h.ids) for h in headers)
        if buffers_of is None:
            buffers_of = 0 if self._contract.buffers == "rank 0" else rank
        load_state(self._model, self._trace, rank=rank, buffers_of=buffers_of, step=step)
        batch = self._ingredients.batch(torch.tensor(header.ids, dtype=torch.int64), total)
        torch.set_rng_state(torch.frombuffer(bytearray(header.rng_state), dtype=torch.uint8))
        loss = self._ingredients.loaded.workload.loss(self._model, batch)
        loss_value = float(loss.detach())
        weight = len(header.ids) * len(headers) / total
        if self._contract.weighting == "loss" and weight != 1.0:
            loss = loss * weight
        loss.backward(self._cotangent(loss, header.loss_factor))
        return ShardResult(
            loss=loss_value,
            gradients=[p.grad for _, p in trainable(self._model)],
            buffers=[b.clone() for b in self._model.buffers()],
        )

    def _cotangent(self, loss: torch.Tensor, observed: float) -> torch.Tensor | None:
        """What backward starts with: the factor that a strategy without a promise has put on."""
        if not self._contract.observes_loss or observed == 1.0:
            return None
        return torch.full_like(loss, observed)
