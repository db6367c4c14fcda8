"""Hears of every operator that torch runs in a model's forward passes, in torch's losses and in
backward, with digests of what each is given and makes of that.

Code that torch.compile has compiled calls few operators: a compiled module is noted as one. What
distcheck itself computes is left out, and so is what an operator is given to be written over.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from distcheck.job.inside import hooks, tensors
from distcheck.job.inside.modules import plain_of
from distcheck.machine.compat import (
    OpMode,
    draws_random_numbers,
    tree_leaves,
    written_arguments,
)
from distcheck.recordings.jobs import records
from distcheck.recordings.jobs.records import COMPILED, MOST_OPS, OpCall, Ops

# These write over the tensor that they are called on, whatever it holds.
_FILLS = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_",
    "cauchy_", "copy_", "fill_", "zero_",
}  # fmt: skip
_PLAIN = (str, int, float, bool, complex, torch.dtype, torch.device, torch.layout, type(None))


class OpLog(OpMode):
    """The operators of a step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[OpCall] = []
        self._left_out = 0
        self._part = ""  # that runs now
        self.is_silent = False  # while distcheck itself computes
        self.module = ""  # that is being called

    @contextlib.contextmanager
    def hears(self, part: str) -> Iterator[None]:
        """Hears of operators in a part of a step; within another one, as a part of that."""
        if self._part:
            yield
            return
        self._part = part
        try:
            with self:
                yield
        finally:
            self._part = ""

    def taken(self) -> Ops:
        return Ops(tuple(self._calls), self._left_out)

    def region(self, name: str, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """A module that is compiled was called."""
        self._add(OpCall(COMPILED, _joined(inputs), _joined(outputs), name, self._part))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_silent:
            return func(*args, **kwargs)
        given = hooks.guarded(self._given, func, args, kwargs)
        made = func(*args, **kwargs)
        if given is not None:
            hooks.guarded(self._made, func, given, args, kwargs, made)
        return made

    def _given(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        known = written_arguments(func)
        over = {name for name, how in known.items() if how == "out"}
        if str(func).split(".")[1:2] and str(func).split(".")[1] in _FILLS:
            over |= {*[*known][:1]}
        given = {**dict(zip(known, args, strict=False)), **kwargs} if known else (args, kwargs)
        if isinstance(given, dict):
            given = {name: one for name, one in given.items() if name not in over}
        return _digest(given)

    def _made(
        self, func: Any, given: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        name, known = str(func).removesuffix(".default"), written_arguments(func)
        if name.startswith(("c10d.", "_c10d_functional.")):
            outputs = ""  # it is not over: what it leaves is what later ones are given
        elif ".empty" in name or ".new_empty" in name:
            outputs = records.digest(b"")  # which holds anything
        else:
            named = {**dict(zip(known, args, strict=False)), **kwargs}
            outputs = _digest(([one for n, one in named.items() if known.get(n)], made))
        draws = draws_random_numbers(func)
        self._add(OpCall(name, given, outputs, self.module, self._part, draws))

    def _add(self, call: OpCall) -> None:
        if len(self._calls) < MOST_OPS:
            self._calls.append(call)
        else:
            self._left_out += 1


def _digest(value: Any) -> str:
    return _joined(_noted(one) for one in tree_leaves(value))


def _noted(one: Any) -> str:
    if not isinstance(one, torch.Tensor):
        return repr(one) if isinstance(one, _PLAIN) else type(one).__name__
    plain = plain_of(one)
    about = f"{one.dtype}{tuple(one.shape)}"
    return about if plain is None else about + tensors.digest_of(plain.contiguous())


def _joined(digests: Iterable[str]) -> str:
    return records.digest("".join(digests).encode())
