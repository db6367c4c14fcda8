"""Tensors that a call still reads or writes: which rank may not use them yet, and how.

From the moment a call is posted until its rank has waited for it, the call may read what it sends
and write what it leaves. Until then the rank may only read the first, and must not touch the
second. Operations are seen by a dispatch mode, which is there only while a call is in flight, and
methods that read memory by themselves (`tolist`, `repr`, pickle) where they begin. What does not
go through torch (NumPy's view of a tensor) is not seen. Calls of torch's own code are not watched:
DDP, FSDP and the pipeline schedules wait in ways of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distcheck.machine import compat
from distcheck.worlds.callers import place_of_caller
from distcheck.worlds.simulated.calls import SimulatedCall, is_called_by_theirs

_SEEN = "aten"  # the operations that touch memory; others are of c10d, or only describe
# Operations that take a tensor for its size or its storage, and touch no element.
_TOUCH_NOTHING = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    "is_same_size", "is_pinned", "is_set_to", "set_", "resize_", "resize_as_", "record_stream",
    "result_type",
}  # fmt: skip
_MOST_BYTES = 1 << 26  # of memory with gaps that is compared byte by byte; chosen


@dataclass(eq=False)
class TensorInFlight:
    """A tensor of a call in flight: of the storage at `address` the bytes from `begin` to `end`."""

    call: SimulatedCall
    tensor: torch.Tensor
    writes: bool
    address: int
    begin: int
    end: int
    dense: bool


class InFlight(compat.TorchDispatchMode):
    """The tensors that calls of one rank hold. `accuse(what)` never returns."""

    def __init__(self, rank: int, accuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self._accuse = rank, accuse
        self._held: dict[int, list[TensorInFlight]] = {}  # by the address of the storage
        self._calls: dict[SimulatedCall, list[int]] = {}

    def begin(self, call: SimulatedCall) -> None:
        """Notes a call that is posted now, and checks that its tensors are free for it."""
        of_their_code = is_called_by_theirs(call.stack)
        if not of_their_code and not self._held:
            return  # DDP gathers a tensor of every rank on each: of 1,024 a million
        only_gives = call.kind == "broadcast" and call.rank == call.root
        written = [] if only_gives else call.outputs
        uses = [(t, True) for t in written] + [(t, False) for t in call.inputs]
        own = [held for t, writes in uses if (held := hold(call, t, writes)) is not None]
        if self._held:
            for held in own:
                self._check(held)
        if own and of_their_code:
            for held in own:
                self._held.setdefault(held.address, []).append(held)
                self._calls.setdefault(call, []).append(held.address)
            self._look_on()

    def end(self, call: SimulatedCall) -> None:
        for address in self._calls.pop(call, ()):
            left = [held for held in self._held.get(address, ()) if held.call is not call]
            if left:
                self._held[address] = left
            else:
                self._held.pop(address, None)
        if not self._held:
            self._look_away()

    def not_waited_for(self) -> list[SimulatedCall]:
        return list(self._calls)

    def read(self, tensor: torch.Tensor, how: str) -> None:
        """Checks what a method of a tensor reads, before it does."""
        if self._held and (held := hold(None, tensor, False)) is not None:
            self._check(held, how)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Checks what an operation uses, before it does."""
        kwargs = kwargs or {}
        if self._held and func.namespace == _SEEN and _name(func) not in _TOUCH_NOTHING:
            for tensor, writes in _touched(func, args, kwargs):
                held = hold(None, tensor, writes)
                if held is not None:
                    self._check(held, _name(func))
        return func(*args, **kwargs)

    def _check(self, use: TensorInFlight, operation: str = "") -> None:
        for held in self._held.get(use.address, ()):
            if held.call is not use.call and (use.writes or held.writes) and overlap(use, held):
                self._accuse(self._in_words(held, use, operation))

    def _in_words(self, held: TensorInFlight, use: TensorInFlight, operation: str) -> str:
        call = held.call
        does = "wrote to" if use.writes else "read"
        if use.call is not None:
            does = f"called {use.call.in_words()}{use.call.where} on"
        does_itself = "writes it" if held.writes else "reads it"
        dropped = call.work is None or call.work() is None
        waited = "nothing can wait for it, as its work was not kept" if dropped else (
            "its work had not been waited for"
        )  # fmt: skip
        size = "x".join(map(str, use.tensor.shape)) or "scalar"
        where = "" if use.call is not None else self._place(operation)
        return (
            f"rank {self._rank} {does} a tensor of [{size}]{where} that {call.in_words()}"
            f"{call.where} still {does_itself}: {waited}"
        )

    @staticmethod
    def _place(operation: str) -> str:
        place = place_of_caller()
        return f" by {operation} at {place}" if place else (
            f" by {operation}, after the code under test had returned"
        )  # fmt: skip

    # -- the stack of modes ---------------------------------------------------------------------

    def _look_on(self) -> None:
        """Puts this below all other modes, which are taken off in their own order."""
        modes = compat.modes()
        if not modes:
            compat.push_mode(self)
        elif self not in modes:
            _put_modes([self, *_take_modes()])

    def _look_away(self) -> None:
        modes = compat.modes()
        if modes == [self]:
            compat.pop_mode()
        elif self in modes:
            _put_modes([mode for mode in _take_modes() if mode is not self])


def unseen() -> Any:
    """Within it, operations of this thread are not looked at: those of distcheck itself."""
    return compat.without_modes()


def _take_modes() -> list[Any]:
    modes = compat.modes()
    for _ in modes:
        compat.pop_mode()
    return modes


def _put_modes(modes: Sequence[Any]) -> None:
    for mode in modes:
        compat.push_mode(mode)


def _name(func: Any) -> str:
    return str(compat.schema_of(func).name.partition("::")[2])


def _touched(
    func: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an operation reads or writes. What it only makes a view of is neither."""
    for place, argument in enumerate(compat.schema_of(func).arguments):
        given = args[place] if place < len(args) else named.get(argument.name)
        alias = argument.alias_info
        if given is None or (alias is not None and not alias.is_write):
            continue
        for one in given if isinstance(given, list | tuple) else (given,):
            if isinstance(one, torch.Tensor):
                yield one, alias is not None


def hold(call: Any, tensor: torch.Tensor, writes: bool) -> TensorInFlight | None:
    """Where a tensor lies in memory; None where it has none that can be compared."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not address:
        return None
    begin, size, span = int(tensor.storage_offset()), tensor.element_size(), span_of(tensor)
    dense = span == tensor.numel()
    return TensorInFlight(call, tensor, writes, address, begin * size, (begin + span) * size, dense)


def span_of(tensor: torch.Tensor) -> int:
    """How many elements of memory lie from its first to its last."""
    if tensor.is_contiguous():
        return tensor.numel()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((count - 1) * stride for count, stride in pairs) + 1


def overlap(one: TensorInFlight, other: TensorInFlight) -> bool:
    """Whether two tensors of one storage share a byte."""
    begin, end = min(one.begin, other.begin), max(one.end, other.end)
    if one.begin >= other.end or other.begin >= one.end:
        return False
    if one.dense and other.dense:
        return True
    if end - begin > _MOST_BYTES:
        return False  # not known
    with unseen():
        return bool((_bytes_of(one, begin, end) & _bytes_of(other, begin, end)).any())


def _bytes_of(held: TensorInFlight, begin: int, end: int) -> torch.Tensor:
    """Which bytes [n] of a stretch of memory a tensor has."""
    tensor, found = held.tensor, torch.zeros(end - begin, dtype=torch.bool)
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    for byte in range(size):
        found.as_strided(tensor.shape, strides, held.begin - begin + byte).fill_(True)
    return found
