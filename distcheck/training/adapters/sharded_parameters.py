"""Parameters that a user's module holds in pieces: where each element is, and the whole of them.

How code divides a parameter (flat or by rows, padded, in one tensor with others, whole parameters
to single ranks) is not guessed. A copy of the model whose elements are numbered from 1 is wrapped
first, and what its wrapper holds are then the numbers of the elements; 0 is padding. One copy is
wrapped per digit, in the largest base whose digits the parameters' dtypes hold exactly.

Gradients and optimizer state lie as the parameters do, so the same places put them together.
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
    """Elements of the model that no rank holds any more."""


class ShardedParameters:
    """The places of a model's elements in the tensors that this rank holds.

    `whole` is a model that is not trained; what is put together is written into it. A copy is, once
    `train` has wrapped it.
    """

    def __init__(
        self,
        whole: nn.Module,
        *,
        what: str,
        undivided: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`undivided` is what is said where every rank holds everything; empty: nothing is. `group`
        has the ranks that hold one model together (None: all).
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
        self._owned: list[torch.Tensor] = []  # per held tensor: whether this rank speaks for it
        self.trained = whole
        self.held: list[nn.Parameter] = []

    def train(self, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """What the wrapper makes of a copy of the model. Raises UsageError where its pieces are not
        those of the numbered copies, and what `_learn` raises.
        """
        self._learn(wrap)
        self.trained = copy.deepcopy(self.whole)
        wrapped = wrap(self.trained)
        self.held = list(wrapped.parameters())
        self._check([p.detach() for p in self.held])
        return wrapped

    def _learn(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Wraps numbered copies and reads the places off them, on every rank at once.

        Raises UsageError where the numbers are not found again, or all of them on every rank,
        LostElementsError where some are on none.
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
                raise UsageError(f"{self._what} divides one model in different ways")
            numbers_held = [a + b * base**digit for a, b in zip(held, read, strict=True)]
        self._places = [numbers - 1 for numbers in numbers_held]
        self._divide()

    def _read(self, held: nn.Parameter, base: int) -> torch.Tensor:
        values = held.detach().flatten().double()
        numbers = values.nan_to_num(-1, -1, -1).long()
        if not bool(((numbers == values) & (numbers >= 0) & (numbers < base)).all()):
            raise UsageError(
                f"{self._what} does not only divide the module's numbers among the ranks: its "
                "constructor changes them, so they cannot be put together again"
            )
        return numbers

    def _divide(self) -> None:
        """Which rank speaks for an element: the lowest that holds it."""
        here = torch.cat([*self._places, self._zeros(0)])
        mine = here[here >= 0]
        if bool((mine >= self._total).any()) or len(mine.unique()) != len(mine):
            raise UsageError(
                f"{self._what} has parameters() that hold an element twice on rank {self._rank}; "
                "each element must be in one piece"
            )
        speaker = self._zeros(self._total) + self._nobody
        speaker[mine] = self._rank
        dist.all_reduce(speaker, dist.ReduceOp.MIN, group=self._group)
        lost = (speaker == self._nobody).nonzero().flatten().cpu()
        if len(lost):
            raise LostElementsError(self._say_lost(lost))
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

    def _say_lost(self, lost: torch.Tensor) -> str:
        owner = torch.searchsorted(self._ends, lost, right=True)
        counts = owner.bincount(minlength=len(self._parameters)).tolist()
        named = [
            f"{count} of {name}'s {parameter.numel()}"
            for (name, parameter), count in zip(self._parameters.items(), counts, strict=True)
            if count
        ]
        more = f" and of {len(named) - 3} others" if len(named) > 3 else ""
        return (
            f"{self._what} has lost elements: {', '.join(named[:3])}{more} are held by no rank; "
            "look at how sizes are divided that the number of ranks does not divide"
        )

    def _check(self, values: Sequence[torch.Tensor | None]) -> None:
        fits = len(values) == len(self._places) and all(
            v is None or v.numel() == len(p) for v, p in zip(values, self._places, strict=True)
        )
        if not fits:
            shown = [None if v is None else tuple(v.shape) for v in values]
            raise UsageError(
                f"{self._what} holds tensors of {str(shown)[:120]}, but began with pieces of "
                f"{str([len(p) for p in self._places])[:120]} elements; between steps its "
                "parameters must be those pieces again"
            )

    def together(self, values: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """The whole of what the ranks hold, by the parameters' names: a collective.

        A rank's own copy of an element is preferred to another's. Nothing at all, where no rank
        has anything of a parameter; where some lack their piece, zeros. Exact: bits are added to
        zeros, as integers.
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
        """Puts the parameters together, into the whole model."""
        tensors = self.together([p.detach() for p in self.held])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                value = tensors[name]
                assert value is not None
                parameter.copy_(value)

    def write_gradients(self) -> None:
        """Puts the gradients together, into the whole model."""
        tensors = self.together([p.grad for p in self.held])
        for name, parameter in self._parameters.items():
            parameter.grad = tensors[name]

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
        """An optimizer's state over the pieces as state over the whole parameters. What is not
        a piece (a count of steps) is taken from the rank that speaks for a parameter's first
        element.
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
    """The least b such that the dtype holds every integer below b, and not every one above."""
    if not dtype.is_floating_point:
        raise UsageError(f"parameters of {dtype} cannot be put together from pieces")
    return int(2 / spacing(dtype))


class OptimizerOverShards(OptimizerProxy):
    """The workload's optimizer over a rank's pieces; after a step the whole model is as it is."""

    def __init__(self, inner: torch.optim.Optimizer, pieces: ShardedParameters) -> None:
        super().__init__(inner)
        self._pieces = pieces
        self._collect()

    @property
    def state(self) -> Any:
        """Of the whole parameters."""
        return self._state

    def step(self) -> None:
        """Steps the pieces, then puts parameters and state together."""
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
