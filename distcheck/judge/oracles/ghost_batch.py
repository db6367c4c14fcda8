"""The ghost batch: one pass over the full batch in which BatchNorm normalizes like the ranks.

Every BatchNorm is called once for each set of samples that some rank normalizes separately: a
shard, or a micro-batch of a shard. The layer's forward is called, in its current mode and with the
buffers of the rank, so that a layer in eval mode, or of a custom class, computes the same function
as on the rank. The model's buffers are unchanged.

If the code under test communicates in forward, a layer with a custom forward may normalize over all
ranks. It receives the full batch, like the rest of that code.

A layer may see several rows per sample, as over flattened sequences. They must be ordered by sample
(`distcheck.verification.inspection` checks this).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.compat import BatchNorm


@dataclass(frozen=True)
class GhostSegment:
    """A part of the batch, of `samples` samples, that a layer normalizes separately on one rank."""

    samples: int
    rank: int


BuffersOf = Callable[[int, str], torch.Tensor | None]  # (rank, name): as recorded, if it was
Buffers = dict[str, torch.Tensor]  # of one layer, by name


class GhostBatch:
    """Context in which BatchNorm in `model` processes a batch segment by segment.

    After the context, `normalized` is True if a segment was normalized by its statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        stretches: Sequence[GhostSegment],
        buffers_of: BuffersOf,
        *,
        keep_outputs: bool = False,
        exchanges_itself: bool = False,
    ) -> None:
        self._stretches, self._buffers_of, self._keep = stretches, buffers_of, keep_outputs
        self._samples = sum(stretch.samples for stretch in stretches)
        self._layers = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, BatchNorm) and not (exchanges_itself and _has_own_forward(layer))
        ]
        self._patched: list[tuple[BatchNorm, Any, Buffers]] = []
        self._outputs: dict[str, list[torch.Tensor]] = {}
        self._alone: int | None = None
        self._calls: dict[str, int] = {}
        self.normalized = False

    def __enter__(self) -> "GhostBatch":
        for name, layer in self._layers:
            self._patched.append((layer, layer.__dict__.get("forward"), _buffers_of(layer)))
            layer.forward = self._forward(name, layer)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for layer, own, buffers in self._patched:
            del layer.forward
            if own is not None:  # an instance may have had one of its own
                layer.forward = own  # type: ignore[method-assign]
            _set_buffers(layer, buffers)
        self._patched.clear()

    def alone(self, sample: int) -> None:
        """Process only this sample from now on: every layer returns its output for it from the
        full-batch pass (`keep_outputs`).
        """
        self._alone, self._calls = sample, {}

    def _forward(self, name: str, layer: BatchNorm) -> Callable[..., torch.Tensor]:
        own = layer.forward
        held: dict[int, Buffers] = {}  # per rank, from call to call

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            (inputs,) = (*args, *kwargs.values())
            outputs = self._outputs.setdefault(name, [])
            if self._alone is not None:
                call = self._calls[name] = self._calls.get(name, -1) + 1
                rows = len(outputs[call]) // self._samples
                return outputs[call][self._alone * rows : (self._alone + 1) * rows]
            unknown = layer.running_mean is None and layer.running_var is None
            self.normalized |= layer.training or unknown
            parts = []
            for stretch, part in zip(self._stretches, self._split(name, inputs), strict=True):
                if stretch.rank not in held:
                    held[stretch.rank] = self._recorded_buffers(name, layer, stretch.rank)
                # Other tensors, not other values: backward needs those of every stretch.
                _set_buffers(layer, held[stretch.rank])
                parts.append(own(part))
                held[stretch.rank] = _buffers_of(layer)
            together = torch.cat(parts)
            if self._keep:
                outputs.append(together.detach())
            return together

        return forward

    def _split(self, name: str, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split rows into stretches. Raises NotRecordedError if rows do not belong to samples."""
        if len(self._stretches) == 1:
            return (inputs,)
        rows, left = divmod(len(inputs), self._samples)
        if left or rows == 0:
            raise NotRecordedError(
                f"{name or 'the BatchNorm'} sees {len(inputs)} rows of {self._samples} samples: "
                "the rank of each row is not recorded, but BatchNorm depends on it"
            )
        return torch.split(inputs, [stretch.samples * rows for stretch in self._stretches])

    def _recorded_buffers(self, name: str, layer: BatchNorm, rank: int) -> Buffers:
        """Return copies of the layer's buffers as recorded by a rank; unnamed ones are its own."""
        found: Buffers = {}
        for key, buffer in _buffers_of(layer).items():
            known = self._buffers_of(rank, f"{name}.{key}" if name else key)
            found[key] = (buffer if known is None else known).clone().to(buffer)
        return found


def _has_own_forward(layer: BatchNorm) -> bool:
    return type(layer).forward is not BatchNorm.forward


def _buffers_of(layer: nn.Module) -> Buffers:
    return dict(layer.named_buffers(recurse=False, remove_duplicate=False))


def _set_buffers(layer: nn.Module, buffers: Buffers) -> None:
    for name, buffer in buffers.items():
        setattr(layer, name, buffer)
