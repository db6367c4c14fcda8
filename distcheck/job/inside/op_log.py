"""Records every operator in forward passes, torch losses and backward, with digests of its inputs
and outputs.

Code compiled by torch.compile calls few operators, so a compiled module is one record. distcheck's
own computations, and inputs that an operator only overwrites, are not recorded.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from distcheck.job.inside import hooks, tensors
from distcheck.machine.compat import (
    OpMode,
    draws_random_numbers,
    tree_leaves,
    written_arguments,
)
from distcheck.recordings.jobs import records
from distcheck.recordings.jobs.records import COMPILED, MOST_OPS, OpCall, RecordedOps
from distcheck.worlds.callers import line_of_script

# They overwrite the tensor, whatever its contents.
_FILLS = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_",
    "cauchy_", "copy_", "fill_", "zero_",
}  # fmt: skip
_PLAIN = (str, int, float, bool, complex, torch.dtype, torch.device, torch.layout, type(None))


class OpLog(OpMode):
    """Recorded operators of a step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[OpCall] = []
        self._left_out = 0
        self._part = ""  # the running part
        self.is_silent = False  # while distcheck computes
        self.module = ""  # the module being called

    @contextlib.contextmanager
    def hears(self, part: str) -> Iterator[None]:
        """Record operators in a part of a step. A nested part belongs to the outer part."""
        if self._part:
            yield
            return
        self._part = part
        try:
            with self:
                yield
        finally:
            self._part = ""

    def taken(self) -> RecordedOps:
        return RecordedOps(tuple(self._calls), self._left_out)

    def region(self, name: str, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Record the call of a compiled module."""
        self._add(OpCall(COMPILED, _join_digests(inputs), _join_digests(outputs), name, self._part))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_silent:
            return func(*args, **kwargs)
        given = hooks.guarded(self._digest_inputs, func, args, kwargs)
        made = func(*args, **kwargs)
        if given is not None:
            hooks.guarded(self._made, func, given, args, kwargs, made)
        return made

    def _digest_inputs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
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
            outputs = ""  # not complete: later operators show the result
        elif ".empty" in name or ".new_empty" in name:
            outputs = records.digest(b"")  # uninitialized memory
        else:
            named = {**dict(zip(known, args, strict=False)), **kwargs}
            outputs = _digest(([one for n, one in named.items() if known.get(n)], made))
        draws = draws_random_numbers(func)
        line = line_of_script()
        self._add(OpCall(name, given, outputs, self.module, self._part, draws, line))

    def _add(self, call: OpCall) -> None:
        if len(self._calls) < MOST_OPS:
            self._calls.append(call)
        else:
            self._left_out += 1


def _digest(value: Any) -> str:
    return _join_digests(_describe_argument(one) for one in tree_leaves(value))


def _describe_argument(one: Any) -> str:
    if not isinstance(one, torch.Tensor):
        return repr(one) if isinstance(one, _PLAIN) else type(one).__name__
    plain = tensors.plain_of(one)
    about = f"{one.dtype}{tuple(one.shape)}"
    return about if plain is None else about + tensors.digest_of(plain.contiguous())


def _join_digests(digests: Iterable[str]) -> str:
    return records.digest("".join(digests).encode())
