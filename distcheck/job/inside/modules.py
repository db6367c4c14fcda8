"""Records the modules of a model in the forward pass: their inputs and outputs, and the gradients
of both.

A tensor is stored as a digest and 64 projections, so recording needs little memory and keeps no
autograd graph. Code compiled by torch.compile calls no inner modules, so only the inputs and
outputs of the compiled module are recorded. Recomputation for activation checkpointing belongs to
backward and is not recorded.
"""

import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distcheck.job.inside import hooks, tensors
from distcheck.machine.compat import is_compiled, version_of
from distcheck.recordings.jobs import records
from distcheck.recordings.jobs.sketches import SLOTS, project
from distcheck.recordings.jobs.watched import (
    MOST_CALLS,
    MOST_TENSORS,
    ModuleCall,
    Shape,
    WatchedCalls,
    WatchedStep,
    WatchedTensor,
)

if TYPE_CHECKING:
    from distcheck.job.inside.op_log import OpLog

Pairs = Sequence[tuple[int, int]]  # rank, forward pass
Shapes = Mapping[str, Shape | None]
_NONE = torch.full((SLOTS,), math.nan, dtype=torch.float64)


class TensorSlice(NamedTuple):
    """The part of a tensor that belongs to a rank: `length` elements from `start` along `axis`; the
    whole tensor if there is no axis.
    """

    axis: int = -1
    start: int = 0
    length: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.axis < 0 else tensor.narrow(self.axis, self.start, self.length)


@dataclass
class _Table:
    """Recorded modules of one rank in a step."""

    calls: list[ModuleCall] = field(default_factory=list)
    tensors: list[WatchedTensor] = field(default_factory=list)
    sums: list[list[torch.Tensor]] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)

    def add(self, tensor: torch.Tensor | None, trains: bool) -> int:
        digest, sums, shape = "", _NONE, None
        if tensor is not None:
            digest, sums, shape = *_digest_and_sketch(tensor), tuple(tensor.shape)
        self.tensors.append(WatchedTensor(shape, digest, trains))
        self.sums.append([sums, _NONE])
        return len(self.tensors) - 1

    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """Add a gradient. If backward visits the graph twice, the projections are summed."""
        digest, sums = _digest_and_sketch(gradient)
        one, before = self.tensors[place], self.sums[place][1]
        if one.gradient:
            digest = records.digest(f"{one.gradient}{digest}".encode())
            sums = sums + before
        else:
            self.backward.append(place)
        self.tensors[place] = WatchedTensor(one.shape, one.digest, one.trains, digest)
        self.sums[place][1] = sums


class _Call(NamedTuple):
    name: str
    kind: str
    again: int
    inputs: list[tuple[int, ...]]  # per tensor: its index in the table of each pair
    depth: int


class Modules:
    """Recorded modules of one step."""

    def __init__(self, ops: "OpLog | None" = None) -> None:
        self._ops = ops
        self._tables: dict[int, _Table] = {}
        self._names: dict[int, str] = {}
        self._pairs: Pairs = ()
        self._shapes: Mapping[int, Shapes] = {}
        self._counts: dict[str, int] = {}
        self._open: list[str] = []  # the modules that are being called
        # Tensors of this pass, by id: the object, its version then, and its indices.
        self._known: dict[int, tuple[Any, int, tuple[int, ...]]] = {}
        self._left_out = 0
        self._compiled: dict[str, None] = {}

    def enters(
        self, root: torch.nn.Module, number: int, pairs: Pairs, shapes: Mapping[int, Shapes]
    ) -> None:
        """Start a forward pass of the model with this number, for the samples of these ranks. If
        there are several ranks, `shapes` are the shapes of each rank's tensors by their place in a
        call.
        """
        of = f"{type(root).__name__}-{number}." if number else ""
        named = dict(root.named_modules())
        self._names = {id(one): of + tensors.plain_name(name) for name, one in named.items()}
        for name, one in named.items():
            if is_compiled(one):
                self._compiled[of + tensors.plain_name(name)] = None
        self._pairs, self._shapes = pairs, shapes
        self._counts, self._open, self._known = {}, [], {}
        hooks.set_watched_modules(self)

    def begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> _Call | None:
        """Record a module call; None if it is not recorded, such as the module inside a wrapper."""
        kind = type(module).__name__
        name = self._names.get(id(module), f"({kind}, outside of the model)")
        if self._open and self._open[-1] == name:
            return None
        if sum(len(table.calls) for table in self._tables.values()) >= MOST_CALLS:
            self._left_out += 1
            return None
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        given = self._places(f"{name}#{count}/in", (args, kwargs))
        self._open.append(name)
        self._set_module_of_ops()
        return _Call(name, kind, count, given, len(self._open) - 1)

    def ends(self, call: _Call, result: Any) -> None:
        del self._open[call.depth :]
        self._set_module_of_ops()
        returned = self._places(f"{call.name}#{call.again}/out", result)
        for at, (rank, number) in enumerate(self._pairs):
            inputs, outputs = (tuple(p[at] for p in many) for many in (call.inputs, returned))
            made = ModuleCall(call.name, call.kind, number, call.again, inputs, outputs)
            table = self._table(rank)
            table.calls.append(made)
            if self._ops is not None and call.name in self._compiled:
                digests = [[table.tensors[p].digest for p in many] for many in (inputs, outputs)]
                self._ops.region(call.name, *digests)

    def _set_module_of_ops(self) -> None:
        if self._ops is not None:
            self._ops.module = self._open[-1] if self._open else ""

    def taken(self) -> dict[int, WatchedStep]:
        return {
            rank: WatchedStep(
                WatchedCalls(
                    calls=tuple(table.calls),
                    tensors=tuple(table.tensors),
                    backward=tuple(table.backward),
                    left_out=self._left_out,
                    compiled=tuple(self._compiled),
                ),
                torch.stack([one for both in table.sums for one in both]).view(-1, 2, SLOTS)
                if table.sums
                else torch.empty(0, 2, SLOTS, dtype=torch.float64),
            )
            for rank, table in self._tables.items()
        }

    def _table(self, rank: int) -> _Table:
        return self._tables.setdefault(rank, _Table())

    def _places(self, of: str, value: Any) -> list[tuple[int, ...]]:
        found = tensors.leaves(value)[:MOST_TENSORS]
        return [self._table_index(f"{of} {number}", one) for number, one in enumerate(found)]

    def _table_index(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the index of a tensor in the table of each pair. A tensor that was not modified is
        stored once.
        """
        version = version_of(tensor)
        held, then, places = self._known.get(id(tensor), (None, 0, ()))
        if held is not None and held() is tensor and then == version:
            return places
        plain = tensors.plain_of(tensor)
        parts = [self._part(name, plain, pair) for pair in self._pairs]
        trains = tensor.requires_grad
        places = tuple(
            self._table(rank).add(None if plain is None or part is None else part.of(plain), trains)
            for (rank, _), part in zip(self._pairs, parts, strict=True)
        )
        if version is not None:
            self._known[id(tensor)] = weakref.ref(tensor), version, places
        to = [
            (self._table(rank), place, part)
            for (rank, _), place, part in zip(self._pairs, places, parts, strict=True)
            if part is not None
        ]
        if to and tensor.grad_fn is not None:
            tensor.register_hook(functools.partial(_on_gradient, to))
        return places

    def _part(
        self, name: str, tensor: torch.Tensor | None, pair: tuple[int, int]
    ) -> TensorSlice | None:
        """Return the part of a tensor that belongs to a pair, or None if unknown."""
        if tensor is None:
            return None
        if len(self._pairs) == 1:
            return TensorSlice()
        shapes = [self._shapes[rank].get(f"{number}/{name}") for rank, number in self._pairs]
        at, whole = self._pairs.index(pair), tuple(tensor.shape)
        if all(shape == whole for shape in shapes):
            return TensorSlice()
        known = [one for one in shapes if one is not None and len(one) == len(whole)]
        for axis in range(len(whole) if len(known) == len(shapes) else 0):
            sizes = [one[axis] for one in known]
            together = {(*one[:axis], sum(sizes), *one[axis + 1 :]) for one in known}
            if together == {whole}:
                return TensorSlice(axis, sum(sizes[:at]), sizes[at])
        return None


def _on_gradient(to: list[tuple[_Table, int, TensorSlice]], gradient: torch.Tensor) -> None:
    hooks.guarded(_note_gradient, to, gradient)


def _note_gradient(to: list[tuple[_Table, int, TensorSlice]], gradient: torch.Tensor) -> None:
    plain = tensors.plain_of(gradient)
    if plain is not None:
        for table, place, part in to:
            table.add_gradient(place, part.of(plain))


def _digest_and_sketch(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    dense = tensor.contiguous()
    is_complex = dense.is_complex()
    numbers = torch.view_as_real(dense.resolve_conj()) if is_complex else dense
    has_sums = numbers.is_floating_point()
    return tensors.digest_of(dense), project(numbers) if has_sums else _NONE
