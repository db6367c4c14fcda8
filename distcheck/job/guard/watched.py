"""The trained model, found at its first call and observed in selected steps.

The hooks are on the module inside DistributedDataParallel, which has already broadcast buffers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from distcheck.job.guard.digests import as_signed_int64, combined, digests
from distcheck.job.inside.tensors import digests_of_samples, leaves, plain_name
from distcheck.machine import compat

_STATISTICS = ("running_mean", "running_var")
MOST_ROWS = 64  # per rank: larger batches send the smallest digests


class WatchedModel:
    """A model. Holds the inputs of a step while it is `armed`, and the state before the step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.armed = True
        self.initial: int | None = None
        self.failure: Exception | None = None
        self._inside = _inside_of(model)
        self._handles = [
            self._inside.register_forward_pre_hook(_Hook(self.enters), with_kwargs=True),
            self._inside.register_forward_hook(_Hook(self.leaves)),
        ]
        self.forget()

    def forget(self) -> None:
        self.rows: set[int] = set()  # digests of samples, the smallest ones
        self.buffers: dict[str, int] | None = None
        self._streams: list[int] | None = None
        self.drawn = [0, 0]  # states of the RNG streams that the first forward pass used

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all parameters by name, without the prefixes of wrappers."""
        for name, parameter in self.model.named_parameters():
            yield plain_name(name), parameter

    def enters(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Record digests of the model's inputs in audited steps."""
        if torch.compiler.is_compiling() or not self.armed or not module.training:
            return
        try:
            self._note(args, kwargs)
        except Exception as error:  # training continues, and the next check reports it
            self.failure = error

    def _note(self, args: Any, kwargs: Any) -> None:
        if self.initial is None:
            found = {n: p for n, p in self.parameters() if not is_library_sharded(p)}
            whole = {n: p for n, p in found.items() if local_shard_and_place(p)[0] is p}
            self.initial = combined([*whole, *digests(list(whole.values()))])
        given = [
            t for t in leaves((args, kwargs)) if not t.requires_grad and not is_library_sharded(t)
        ]
        rows = digests_of_samples(given) if given else ()
        self.rows |= {as_signed_int64(int(row[:16], 16)) for row in rows}
        self.rows = set(sorted(self.rows)[:MOST_ROWS])
        if self.buffers is None and _are_buffers_final(self.model):
            named = list(self._buffers())
            found_digests = digests([buffer for _, buffer in named])
            self.buffers = dict(zip([name for name, _ in named], found_digests, strict=True))
        if self._streams is None:
            self._streams = _streams()

    def leaves(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Record the RNG streams that the first forward pass used."""
        if torch.compiler.is_compiling() or not self.armed or self._streams is None:
            return
        now = _streams()
        for place, (before, after) in enumerate(zip(self._streams, now, strict=True)):
            if before != after and not self.drawn[place]:
                self.drawn[place] = before

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in self.model.named_buffers():
            if not is_library_sharded(buffer) and buffer.device.type != "meta":
                yield plain_name(name), buffer

    def statistics(self) -> set[str]:
        """Return the names of buffers that hold BatchNorm's local running statistics."""
        return {
            plain_name(f"{prefix}.{name}" if prefix else name)
            for prefix, part in self.model.named_modules()
            if isinstance(part, compat.NormBase) and not isinstance(part, torch.nn.SyncBatchNorm)
            for name in _STATISTICS
        }


class _Hook:
    """A hook that is not copied or pickled with the model."""

    def __init__(self, hears: Callable[..., None]) -> None:
        self._hears = hears

    def __call__(self, *given: Any) -> None:
        self._hears(*given)

    def __reduce__(self) -> Any:
        return _nothing_hook, ()


def _do_nothing(*_: Any) -> None:
    """Do nothing."""


def _nothing_hook() -> Callable[..., None]:
    return _do_nothing


def _inside_of(model: torch.nn.Module) -> torch.nn.Module:
    wrapper = torch.nn.parallel.DistributedDataParallel
    return model.module if isinstance(model, wrapper) else model


def _are_buffers_final(model: torch.nn.Module) -> bool:
    """Return True if a hook on the model runs after DistributedDataParallel's broadcast; False if
    DistributedDataParallel itself is compiled.
    """
    wrapper = torch.nn.parallel.DistributedDataParallel
    return not isinstance(getattr(model, compat.COMPILED, None), wrapper)


def _streams() -> list[int]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [*digests(states), 0][:2]


def is_library_sharded(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is sharded in a library's own format: FSDP1, DeepSpeed."""
    return any(hasattr(tensor, name) for name in (*compat.OF_FSDP1, "ds_id"))


class Finder:
    """Waits for the outermost module that is called in training and for which `wanted` returns
    True.
    """

    def __init__(self, wanted: Callable[[torch.nn.Module], bool], *, several: bool = False) -> None:
        self._wanted, self._several = wanted, several
        self.found: list[WatchedModel] = []
        self._handle: Any = register_module_forward_pre_hook(self._on_model_call)

    def close(self) -> None:
        """Stop waiting."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_model_call(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._handle is None:
            return
        if not module.training or not torch.is_grad_enabled() or self._is_within(module):
            return
        if not self._is_wanted(module):
            return
        watched = WatchedModel(module)
        self.found.append(watched)
        if watched._inside is module:  # its hook does not run for this call
            watched.enters(module, args, {})
        if not self._several:
            self.close()

    def _is_wanted(self, module: torch.nn.Module) -> bool:
        try:
            return self._wanted(module)
        except Exception:  # a model's own `parameters` may raise; training continues
            return False

    def _is_within(self, module: torch.nn.Module) -> bool:
        return any(module is part for one in self.found for part in one.model.modules())


def is_in_one_piece(model: torch.nn.Module) -> bool:
    """Return True unless FSDP1 has flattened the parameters of the model."""
    return not any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())


def local_shard_and_place(tensor: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """Return this rank's shard of a tensor, and its place in the whole tensor ("" if it is whole).
    The shard is None for a partial sum.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor, ""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return (None, "") if hasattr(tensor, "__tensor_flatten__") else (tensor, "")
    if any(place.is_partial() for place in tensor.placements):
        return None, ""
    own: list[int] = list(tensor.device_mesh.get_coordinate() or [])
    at = [
        f"{number}:{own[number]}"
        for number, place in enumerate(tensor.placements)
        if place.is_shard() and number < len(own)
    ]
    return tensor.to_local(), ",".join(at)
