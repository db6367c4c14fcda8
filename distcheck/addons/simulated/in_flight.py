"""Detects race conditions: a rank uses a tensor of a call that is still in flight.

A call is in flight from the moment it is posted until its rank has waited for it. During this time
it may read its inputs and write its outputs; the rank may only read the inputs, and must not touch
the outputs. A dispatch mode, active only while a call is in flight, observes operations. Hooks
observe methods that read memory directly (`tolist`, `repr`, pickle). Accesses outside torch, such
as through NumPy's view of a tensor, are not observed. Calls made by torch's own code are not
checked, because DDP, FSDP and the pipeline schedules synchronize by other means.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distcheck.addons.simulated.calls import SimulatedCall, is_called_by_theirs
from distcheck.machine import compat
from distcheck.worlds.callers import place_of_caller

_SEEN = "aten"  # operations that touch memory; others are c10d's, or only metadata
# Operations that use a tensor's size or storage, and touch no element.
_TOUCH_NOTHING = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    "is_same_size", "is_pinned", "is_set_to", "set_", "resize_", "resize_as_", "record_stream",
    "result_type",
}  # fmt: skip
_MOST_BYTES = 1 << 26  # Heuristic: limit for comparing memory with gaps byte by byte


@dataclass(eq=False)
class TensorInFlight:
    """A tensor of a call in flight. It occupies the bytes `begin` to `end` of the storage at
    `address`.
    """

    call: SimulatedCall
    tensor: torch.Tensor
    writes: bool
    address: int
    begin: int
    end: int
    dense: bool


class InFlight(compat.TorchDispatchMode):
    """The tensors of one rank's calls in flight. `accuse(what)` reports a race condition and does
    not return.
    """

    def __init__(self, rank: int, accuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self._accuse = rank, accuse
        self._held: dict[int, list[TensorInFlight]] = {}  # by the address of the storage
        self._calls: dict[SimulatedCall, list[int]] = {}

    def begin(self, call: SimulatedCall) -> None:
        """Record a call that is being posted. Check its tensors against those of other calls."""
        of_their_code = is_called_by_theirs(call.stack)
        if not of_their_code and not self._held:
            return  # DDP gathers a tensor per rank on each: a million for 1,024 ranks
        only_gives = call.kind == "broadcast" and call.rank == call.root
        written = [] if only_gives else call.outputs
        uses = [(t, True) for t in written] + [(t, False) for t in call.inputs]
        own = [
            held for t, writes in uses if (held := memory_in_flight(call, t, writes)) is not None
        ]
        if self._held:
            for held in own:
                self._check(held)
        if own and of_their_code:
            for held in own:
                self._held.setdefault(held.address, []).append(held)
                self._calls.setdefault(call, []).append(held.address)
            self._push_mode()

    def end(self, call: SimulatedCall) -> None:
        for address in self._calls.pop(call, ()):
            left = [held for held in self._held.get(address, ()) if held.call is not call]
            if left:
                self._held[address] = left
            else:
                self._held.pop(address, None)
        if not self._held:
            self._pop_mode()

    def not_waited_for(self) -> list[SimulatedCall]:
        return list(self._calls)

    def read(self, tensor: torch.Tensor, how: str) -> None:
        """Check an access by a tensor method before the method runs."""
        if self._held and (held := memory_in_flight(None, tensor, False)) is not None:
            self._check(held, how)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Check the tensors of an operation before the operation runs."""
        kwargs = kwargs or {}
        if self._held and func.namespace == _SEEN and _name(func) not in _TOUCH_NOTHING:
            for tensor, writes in _accessed_tensors(func, args, kwargs):
                held = memory_in_flight(None, tensor, writes)
                if held is not None:
                    self._check(held, _name(func))
        return func(*args, **kwargs)

    def _check(self, use: TensorInFlight, operation: str = "") -> None:
        for held in self._held.get(use.address, ()):
            if held.call is not use.call and (use.writes or held.writes) and share_bytes(use, held):
                self._accuse(self._describe_misuse(held, use, operation))

    def _describe_misuse(self, held: TensorInFlight, use: TensorInFlight, operation: str) -> str:
        call = held.call
        does = "wrote to" if use.writes else "read"
        if use.call is not None:
            does = f"called {use.call.in_words()}{use.call.where} on"
        does_itself = "writes it" if held.writes else "reads it"
        dropped = call.work is None or call.work() is None
        waited = "nothing can wait for it, because its work handle was discarded" if dropped else (
            "its work had not been waited for"
        )  # fmt: skip
        size = "x".join(map(str, use.tensor.shape)) or "scalar"
        where = "" if use.call is not None else self._where_used(operation)
        return (
            f"rank {self._rank} {does} a tensor of [{size}]{where} that {call.in_words()}"
            f"{call.where} still {does_itself}: {waited}"
        )

    @staticmethod
    def _where_used(operation: str) -> str:
        place = place_of_caller()
        return f" by {operation} at {place}" if place else (
            f" by {operation}, after the code under test returned"
        )  # fmt: skip

    # -- the stack of modes ---------------------------------------------------------------------

    def _push_mode(self) -> None:
        """Push this dispatch mode below all others, because code pops its own modes in order."""
        modes = compat.dispatch_modes()
        if not modes:
            compat.push_mode(self)
        elif self not in modes:
            _put_modes([self, *_take_modes()])

    def _pop_mode(self) -> None:
        modes = compat.dispatch_modes()
        if modes == [self]:
            compat.pop_mode()
        elif self in modes:
            _put_modes([mode for mode in _take_modes() if mode is not self])


def unobserved() -> Any:
    """Return a context in which operations of this thread are not observed. For distcheck's own
    operations.
    """
    return compat.without_modes()


def _take_modes() -> list[Any]:
    modes = compat.dispatch_modes()
    for _ in modes:
        compat.pop_mode()
    return modes


def _put_modes(modes: Sequence[Any]) -> None:
    for mode in modes:
        compat.push_mode(mode)


def _name(func: Any) -> str:
    return str(compat.schema_of(func).name.partition("::")[2])


def _accessed_tensors(
    func: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors that an operation accesses, each with True if it is written. Views are left
    out.
    """
    for place, argument in enumerate(compat.schema_of(func).arguments):
        given = args[place] if place < len(args) else named.get(argument.name)
        alias = argument.alias_info
        if given is None or (alias is not None and not alias.is_write):
            continue
        for one in given if isinstance(given, list | tuple) else (given,):
            if isinstance(one, torch.Tensor):
                yield one, alias is not None


def memory_in_flight(call: Any, tensor: torch.Tensor, writes: bool) -> TensorInFlight | None:
    """Return the memory range of a tensor; None if it has no memory that can be compared."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not address:
        return None
    begin, size, span = int(tensor.storage_offset()), tensor.element_size(), memory_span(tensor)
    dense = span == tensor.numel()
    return TensorInFlight(call, tensor, writes, address, begin * size, (begin + span) * size, dense)


def memory_span(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first element in memory to its last."""
    if tensor.is_contiguous():
        return tensor.numel()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((count - 1) * stride for count, stride in pairs) + 1


def share_bytes(one: TensorInFlight, other: TensorInFlight) -> bool:
    """Return True if two tensors of one storage share a byte."""
    begin, end = min(one.begin, other.begin), max(one.end, other.end)
    if one.begin >= other.end or other.begin >= one.end:
        return False
    if one.dense and other.dense:
        return True
    if end - begin > _MOST_BYTES:
        return False  # unknown, so nothing is reported
    with unobserved():
        return bool((_bytes_of(one, begin, end) & _bytes_of(other, begin, end)).any())


def _bytes_of(held: TensorInFlight, begin: int, end: int) -> torch.Tensor:
    """Return a mask [n]: True for the bytes of a memory range that belong to a tensor."""
    tensor, found = held.tensor, torch.zeros(end - begin, dtype=torch.bool)
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    for byte in range(size):
        found.as_strided(tensor.shape, strides, held.begin - begin + byte).fill_(True)
    return found
