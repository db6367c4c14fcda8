"""Parameters that a user's module shards: finds the place of each element, and unshards.

The layout (flat or by rows, padded, merged with other parameters, whole parameters on single ranks)
is measured, not guessed. A copy of the model whose elements are numbered from 1 is wrapped first.
The wrapper then holds the numbers of its elements; 0 is padding. One copy is wrapped per digit, in
the largest base whose digits the parameters' dtypes represent exactly.

Gradients and optimizer state have the layout of the parameters, so the same places unshard them.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.errors import UsageError
from distcheck.machine.numerics import spacing
from distcheck.training.optimizers import OptimizerProxy


class LostElementsError(Exception):
    """Raised if some elements of the model are on no rank."""


class ShardedParameters:
    """The places of a model's elements in the tensors that this rank holds.

    `whole` is the full model, which is not trained: unsharded values are written into it. `train`
    wraps a copy, which is trained.
    """

    def __init__(
        self,
        whole: nn.Module,
        *,
        what: str,
        undivided: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`undivided` is the error if every rank holds everything (empty: no error). `group`
        contains the ranks that hold one model together (None: all).
        """
        self._group = group
        self.whole, self._what, self._undivided = whole, what, undivided
        self._parameters = dict(whole.named_parameters())
        sizes = [p.numel() for p in self._parameters.values()]
        self._device = next(iter(self._parameters.values())).device
        self._ends = torch.tensor(sizes).cumsum(0)
        self._total = sum(sizes)
        self._rank, self._size = dist.get_rank(), dist.get_world_size(group)
        self._nobody = dist.get_world_size()
        self._places: list[torch.Tensor] = []  # per held tensor: the element's number, or -1
        self._owned: list[torch.Tensor] = []  # per held tensor: True if this rank provides it
        self.trained = whole
        self.held: list[nn.Parameter] = []

    def train(self, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return the wrapped copy of the model. Raises UsageError if its shards differ from those
        of the numbered copies, and the errors of `_measure_layout`.
        """
        self._measure_layout(wrap)
        self.trained = copy.deepcopy(self.whole)
        wrapped = wrap(self.trained)
        self.held = list(wrapped.parameters())
        self._check([p.detach() for p in self.held])
        return wrapped

    def _measure_layout(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Wrap numbered copies and read the places from them; a collective.

        Raises UsageError if the numbers are changed, or if all of them are on every rank, and
        LostElementsError if some are on none.
        """
        base = min(_integers(p.dtype) for p in self._parameters.values())
        numbers_held: list[torch.Tensor] = []
        digits = 1
        while base**digits <= self._total:
            digits += 1
        for digit in range(digits):
            numbered = copy.deepcopy(self.whole)
            numbers = torch.arange(1, self._total + 1, device=self._device) // base**digit % base
            with torch.no_grad():
                cut = numbers.split([p.numel() for p in numbered.parameters()])
                for parameter, part in zip(numbered.parameters(), cut, strict=True):
                    parameter.copy_(part.view(parameter.shape))
            read = [self._read(p, base) for p in wrap(numbered).parameters()]
            held = numbers_held or [torch.zeros_like(part) for part in read]
            if [len(part) for part in read] != [len(part) for part in held]:
                raise UsageError(f"{self._what} shards one model in different ways")
            numbers_held = [a + b * base**digit for a, b in zip(held, read, strict=True)]
        self._places = [numbers - 1 for numbers in numbers_held]
        self._divide()

    def _read(self, held: nn.Parameter, base: int) -> torch.Tensor:
        values = held.detach().flatten().double()
        numbers = values.nan_to_num(-1, -1, -1).long()
        if not bool(((numbers == values) & (numbers >= 0) & (numbers < base)).all()):
            raise UsageError(
                f"{self._what} does not only shard the module's elements: its constructor "
                "changes them, so they cannot be unsharded"
            )
        return numbers

    def _divide(self) -> None:
        """Assign each element to the lowest rank that holds it."""
        here = torch.cat([*self._places, self._zeros(0)])
        mine = here[here >= 0]
        if bool((mine >= self._total).any()) or len(mine.unique()) != len(mine):
            raise UsageError(
                f"{self._what} has parameters() with a duplicated element on rank {self._rank}; "
                "each element must be in exactly one shard"
            )
        speaker = self._zeros(self._total) + self._nobody
        speaker[mine] = self._rank
        dist.all_reduce(speaker, dist.ReduceOp.MIN, group=self._group)
        lost = (speaker == self._nobody).nonzero().flatten().cpu()
        if len(lost):
            raise LostElementsError(self._describe_lost(lost))
        holders = self._zeros(self._total)
        holders[mine] = 1
        dist.all_reduce(holders, group=self._group)
        if self._size > 1 and self._undivided and bool((holders == self._size).all()):
            raise UsageError(self._undivided)
        self._owned = [
            (places >= 0) & (speaker[places.clamp(min=0)] == self._rank) for places in self._places
        ]

    def _zeros(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.long, device=self._device)

    def _describe_lost(self, lost: torch.Tensor) -> str:
        owner = torch.searchsorted(self._ends, lost, right=True)
        counts = owner.bincount(minlength=len(self._parameters)).tolist()
        named = [
            f"{count} of {name}'s {parameter.numel()}"
            for (name, parameter), count in zip(self._parameters.items(), counts, strict=True)
            if count
        ]
        more = f" and of {len(named) - 3} others" if len(named) > 3 else ""
        return (
            f"{self._what} has lost elements: no rank holds {', '.join(named[:3])}{more}; check "
            "how sizes are sharded that are not divisible by the world size"
        )

    def _check(self, values: Sequence[torch.Tensor | None]) -> None:
        fits = len(values) == len(self._places) and all(
            v is None or v.numel() == len(p) for v, p in zip(values, self._places, strict=True)
        )
        if not fits:
            shown = [None if v is None else tuple(v.shape) for v in values]
            raise UsageError(
                f"{self._what} holds tensors of {str(shown)[:120]}, but began with shards of "
                f"{str([len(p) for p in self._places])[:120]} elements; between steps its "
                "parameters must be these shards"
            )

    def together(self, values: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Return the unsharded tensors by parameter name; a collective.

        A rank prefers its copy of an element to those of other ranks. The value is None if no rank
        has any element of a parameter. Missing elements are zeros. The result is exact: bits are
        added to zeros, as integers.
        """
        self._check(values)
        whole = self._zeros(self._total)
        filled = self._zeros(self._total)
        here: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value, places, owned in zip(values, self._places, self._owned, strict=True):
            if value is None:
                continue
            # Adam counts its steps on the CPU, wherever the parameters are.
            bits = value.detach().to(self._device).flatten().double().view(torch.long)
            whole[places[owned]] = bits[owned]
            filled[places[owned]] = 1
            here.append((places[places >= 0], bits[places >= 0]))
        dist.all_reduce(whole, group=self._group)
        dist.all_reduce(filled, group=self._group)
        for places, bits in here:
            whole[places] = bits
            filled[places] = 1
        tensors: dict[str, torch.Tensor | None] = {}
        ends = self._ends.tolist()
        for (name, parameter), end in zip(self._parameters.items(), ends, strict=True):
            cut = slice(end - parameter.numel(), end)
            there = parameter.numel() == 0 or bool(filled[cut].any())
            value = whole[cut].view(torch.double).view(parameter.shape)
            tensors[name] = value.to(parameter.dtype) if there else None
        return tensors

    def write_parameters(self) -> None:
        """Unshard the parameters into the full model."""
        tensors = self.together([p.detach() for p in self.held])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                value = tensors[name]
                assert value is not None
                parameter.copy_(value)

    def write_gradients(self) -> None:
        """Unshard the gradients into the full model."""
        tensors = self.together([p.grad for p in self.held])
        for name, parameter in self._parameters.items():
            parameter.grad = tensors[name]

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
        """Return an optimizer's sharded state as state of the full parameters. A value that is not
        sharded (a step count) is taken from the rank that has a parameter's first element.
        """
        here: list[dict[str, Any]] = [optimizer.state.get(p, {}) for p in self.held]
        keys = sorted({k for s in here for k, v in s.items() if isinstance(v, torch.Tensor)})
        lists: list[Any] = [None] * self._size
        dist.all_gather_object(lists, keys, group=self._group)
        state: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in self._parameters.values()}
        for key in sorted({key for keys in lists for key in keys}):
            values = [s.get(key) for s in here]
            alike = [
                v is None or v.shape == p.shape for v, p in zip(values, self.held, strict=True)
            ]
            scalar = self._any_rank(not all(alike))
            values = [
                v.expand(p.shape) if scalar and v is not None and v.numel() == 1 else v
                for v, p in zip(values, self.held, strict=True)
            ]
            for name, value in self.together(values).items():
                if value is not None:
                    state[self._parameters[name]][key] = value.flatten()[0] if scalar else value
        return state

    def _any_rank(self, here: bool) -> bool:
        flag = self._zeros(1) + int(here)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)


def _integers(dtype: torch.dtype) -> int:
    """Return the largest b such that the dtype has every integer to b. Raises UsageError."""
    if not dtype.is_floating_point:
        raise UsageError(f"parameters of {dtype} cannot be unsharded")
    return int(2 / spacing(dtype))


class OptimizerOverShards(OptimizerProxy):
    """The workload's optimizer on a rank's shards. Each step also updates the full model."""

    def __init__(self, inner: torch.optim.Optimizer, pieces: ShardedParameters) -> None:
        super().__init__(inner)
        self._pieces = pieces
        self._collect()

    @property
    def state(self) -> Any:
        """State of the full parameters."""
        return self._state

    def step(self) -> None:
        """Step the shards, then unshard parameters and state."""
        self._inner.step()
        self._collect()

    def _collect(self) -> None:
        self._pieces.write_parameters()
        self._state = self._pieces.state_of(self._inner)
        trained = dict(self._pieces.trained.named_buffers())
        with torch.no_grad():
            for name, buffer in self._pieces.whole.named_buffers():
                if name in trained and not trained[name].is_meta:
                    buffer.copy_(trained[name])
