"""Recomputes each rank's shard of a step in one process, from the state that the rank recorded."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import nn

from distcheck.contract import Batch, Contract
from distcheck.judge.oracles.shares import declared_factor
from distcheck.machine import devices, seeds
from distcheck.machine.numerics import real_parts
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.layout import CPU_RNG_STATE_BYTES, memory_order, strides_in
from distcheck.recordings.traces.reader import TraceReader
from distcheck.training.building import Ingredients, recorded_parameters
from distcheck.training.whole_tensors import as_dense

_GROWTH_INTERVAL = 2000  # steps, torch.amp.GradScaler's default


class NotRecordedError(Exception):
    """The trace lacks values that an expectation starts from."""


@dataclass(frozen=True)
class ShardResult:
    """One rank's shard: mean loss, gradients per parameter, buffers after forward.

    `magnitudes` are, for each parameter, the summed absolute values of each backward pass's
    gradient in float64 (`real_parts` of complex ones); empty for a single pass. `loss_terms` is the
    sum of the absolute losses of the micro-batches.
    """

    loss: float
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    magnitudes: list[torch.Tensor | None]
    loss_terms: float = 0.0


def loss_scale(ingredients: Ingredients, trace: TraceReader, rank: int, step: int) -> float:
    """Return a rank's GradScaler scale at a step, given which gradients were finite."""
    first = ingredients.training.loss_scale
    if first is None:
        return 1.0
    return loss_scale_after(first, (all_finite(trace, rank, earlier) for earlier in range(step)))


def loss_scale_after(first: float, finite: Iterable[bool]) -> float:
    """Return a GradScaler's scale after several steps, given if each had finite gradients: halved
    after a nonfinite step, doubled after a growth interval of finite steps (torch's defaults).
    """
    scale, in_a_row = first, 0
    for step_was_finite in finite:
        in_a_row = in_a_row + 1 if step_was_finite else 0
        if not step_was_finite:
            scale *= 0.5
        elif in_a_row == _GROWTH_INTERVAL:
            scale, in_a_row = scale * 2.0, 0
    return scale


def all_finite(trace: TraceReader, rank: int, step: int) -> bool:
    found = trace.tensors(rank, Kind.GRADIENT, step)
    return all(bool(g.isfinite().all()) for g in found if g is not None)


def micro_batch_sizes(samples: int, micro_batches: int) -> list[int]:
    """Return the number of samples of each micro-batch of a shard; none is empty."""
    count = min(samples, micro_batches)
    return [samples // count + (n < samples % count) for n in range(count)]


class _Stretch(NamedTuple):
    """The batch of one backward pass, and the two factors of its mean loss, applied in sequence:
    the loop piece's fraction, and its own fraction of that.
    """

    batch: Batch
    shares: tuple[float, float]
    begins_piece: bool


def _split(shard: Batch, accumulate: int, micro_batches: int) -> Iterator[_Stretch]:
    """Yield the loop's pieces of a shard, split into micro-batches by the strategy's backward."""
    for piece in shard.split(accumulate):
        for number, part in enumerate(piece.split(micro_batches)):
            yield _Stretch(part, (piece.share_of(shard), part.share_of(piece)), number == 0)


def load_state(
    model: torch.nn.Module,
    trace: TraceReader,
    *,
    rank: int,
    buffers_of: int | Sequence[int],
    step: int,
) -> None:
    """Load the state of `rank` before `step`, with buffers of rank `buffers_of`, or of a rank for
    each. Memory layouts are reproduced: convolutions choose their kernel, and so their rounding, by
    them.
    """
    with torch.no_grad():
        for index, (name, parameter) in enumerate(recorded_parameters(model)):
            recorded = trace.tensor(rank, Kind.PARAMETER, step, index)
            if recorded is None:
                raise NotRecordedError(f"rank {trace.ranks[rank]} has no {name} before step {step}")
            parameter.grad = None
            set_memory_order(parameter, trace.entry(rank, Kind.PARAMETER, step, index).order)
            parameter.copy_(recorded)
        for index, (name, buffer) in enumerate(model.named_buffers()):
            source = buffers_of if isinstance(buffers_of, int) else buffers_of[index]
            recorded = trace.tensor(source, Kind.BUFFER, step, index)
            if recorded is None:
                owner = trace.ranks[source]
                raise NotRecordedError(f"rank {owner} has no {name} before step {step}")
            set_memory_order(buffer, trace.entry(source, Kind.BUFFER, step, index).order)
            buffer.copy_(recorded)


def set_memory_order(tensor: torch.Tensor, order: int) -> None:
    """Give a tensor a `memory_order` (0: leave it unchanged). A change discards its values."""
    if order and order != memory_order(tensor.shape, tensor.stride()):
        strides = strides_in(order, tensor.shape)
        tensor.data = torch.empty_strided(
            tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
        )


@contextlib.contextmanager
def _measuring(model: torch.nn.Module, *, passes: int) -> Iterator[list[torch.Tensor | None]]:
    """Yield the summed absolute gradients of the block's backward passes; empty for one pass."""
    parameters = [parameter for _, parameter in recorded_parameters(model)] if passes > 1 else []
    sums: list[torch.Tensor | None] = [None] * len(parameters)

    def note(index: int, gradient: torch.Tensor) -> None:
        found = as_dense(gradient)
        assert found is not None
        size, before = real_parts(found).abs().double(), sums[index]
        sums[index] = size if before is None else before + size

    trained = [(index, p) for index, p in enumerate(parameters) if p.requires_grad]
    hooks = [parameter.register_hook(partial(note, index)) for index, parameter in trained]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


class StepReference:
    """Recomputes steps of a trace on `model`, and overwrites its state. `trains` has True for each
    parameter that was trainable when the model was built.
    """

    def __init__(
        self,
        ingredients: Ingredients,
        contract: Contract,
        trace: TraceReader,
        model: nn.Module,
        trains: Sequence[bool] = (),
    ) -> None:
        self._ingredients, self._contract, self._trace = ingredients, contract, trace
        self._model, self._trains = model, trains


class ShardReference(StepReference):
    """Runs shards one after the other."""

    def passes(self, rank: int, step: int) -> list[list[torch.Tensor | None]]:
        """Return the contribution of each backward pass to a rank's gradients, up to rounding."""
        sums: list[list[torch.Tensor | None]] = []

        def note() -> None:
            so_far = [as_dense(parameter.grad) for _, parameter in recorded_parameters(self._model)]
            sums.append([None if total is None else total.clone() for total in so_far])

        self.run(rank, step, after_pass=note)
        nothing: list[torch.Tensor | None] = [None] * len(sums[0])
        earlier = [nothing, *sums[:-1]]
        return [
            [a if a is None or b is None else a - b for a, b in zip(after, before, strict=True)]
            for after, before in zip(sums, earlier, strict=True)
        ]

    def run(
        self,
        rank: int,
        step: int,
        *,
        buffers_of: int | Sequence[int] | None = None,
        after_pass: Callable[[], None] | None = None,
        autocast: torch.dtype | None = None,
    ) -> ShardResult:
        """Run one rank's forward and backward at one step.

        Buffers are those of `buffers_of` (by default as the contract defines). `autocast` is a
        dtype to run the model under torch.autocast. Raises NotRecordedError.
        """
        headers = [self._trace.header(r, step) for r in range(self._trace.layout.world)]
        header = headers[rank]
        total = sum(len(h.ids) for h in headers)
        if buffers_of is None:
            buffers_of = 0 if self._contract.buffers == "rank 0" else rank
        load_state(self._model, self._trace, rank=rank, buffers_of=buffers_of, step=step)
        self._ingredients.prepare(self._model, step)
        batch = self._ingredients.batch(torch.tensor(header.ids, dtype=torch.int64), total)
        devices.set_rng_state(header.rng_state, self._ingredients.device, CPU_RNG_STATE_BYTES)
        seeds.set_library_states(header.library_states)
        weight = len(header.ids) * len(headers) / total
        scale = loss_scale(self._ingredients, self._trace, rank, step)
        accumulate = self._ingredients.training.accumulate
        loss_name = self._contract.loss_given(self._ingredients.case.loss)
        over = sum(h.loss_count for h in headers)
        declared = declared_factor(loss_name, batch.tokens, over, len(headers))
        pieces, loss_terms = list[torch.Tensor](), 0.0
        under = seeds.under(header.settings)
        short = _autocast(self._model, autocast)
        with under, short, _measuring(self._model, passes=accumulate) as sums:
            for cut in _split(batch, accumulate, self._contract.micro_batches):
                loss = self._ingredients.loaded.workload.loss(self._model, cut.batch)
                for share in cut.shares:
                    loss = loss * share if share != 1.0 else loss
                mean_part = loss.detach()
                loss_terms += abs(float(mean_part))
                if cut.begins_piece:
                    pieces.append(mean_part)
                else:
                    pieces[-1] = pieces[-1] + mean_part
                if declared != 1.0:
                    loss = loss * declared
                if self._contract.weighting == "loss" and weight != 1.0:
                    loss = loss * weight
                if scale != 1.0:  # a power of two: bits do not depend on the place
                    loss = loss * scale
                loss.backward(self._cotangent(loss, header.loss_factor))
                if after_pass is not None:
                    after_pass()
        return ShardResult(
            loss=float(reduce(add, pieces)),
            gradients=[as_dense(p.grad) for _, p in recorded_parameters(self._model)],
            buffers=[b.clone() for b in self._model.buffers()],
            magnitudes=sums,
            loss_terms=loss_terms,
        )

    def _cotangent(self, loss: torch.Tensor, observed: float) -> torch.Tensor | None:
        """Return the initial gradient of backward: an observed factor that is not promised."""
        if not self._contract.observes_loss or observed == 1.0:
            return None
        return torch.full_like(loss, observed)


@contextlib.contextmanager
def _autocast(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Run the model under autocast and return float32, as wrappers do."""
    if dtype is None:
        yield
        return
    forward, device = model.forward, next(model.parameters()).device.type

    def shorter(*inputs: Any, **named: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            found = forward(*inputs, **named)
        return found.float() if isinstance(found, torch.Tensor) else found

    model.forward = shorter  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
