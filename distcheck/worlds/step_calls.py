"""Maps tensors to the lines of code under test that communicated them during a recorded step.

`call_recorder` and `simulated/world` report collectives and messages to this module, which keeps
only weak references to the storages of the tensors. A weak reference keeps no memory alive, and
distinguishes a storage from a later one at the same address. Only calls made directly by the code
under test have a line; calls by torch's own code or by C++ code have none.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcheck.records.posted_calls import is_reduction
from distcheck.worlds.callers import line_of_call

_MOST_CALLS = 4096  # of a step
_MOST_DEPTH = 3  # of lists in the arguments of a call
Memory = tuple[Any, int, int]  # a storage, and a range of its bytes


@dataclass(slots=True)
class _Heard:
    line: str
    kind: str
    memory: list[Memory]
    elements: int
    known: bool  # True if all of its tensors have a storage
    adds: str  # ranks whose tensors it adds or averages, if it is an all-reduce


@dataclass(frozen=True)
class CallLines:
    """The lines that communicated certain tensors. `given` are the lines of calls that received any
    of the tensors' memory, and `perhaps` those of calls that may have received copies. If no call
    received their memory, and one line received copies of all of them, that line counts as `given`.
    `reducing` are the lines that only reduce.
    """

    given: Mapping[str, frozenset[str]]
    perhaps: Mapping[str, frozenset[str]]
    reducing: frozenset[str]


class StepCalls:
    """The calls of one rank since the start of a step. `counted` returns the number of calls that
    torch has counted; it is set if some calls may bypass Python.
    """

    def __init__(self, counted: Callable[[], float] | None = None) -> None:
        self._counted = counted or (lambda: 0)
        self._before, self._noted = self._counted(), 0
        self._heard: list[_Heard] = []
        self._lock = threading.Lock()

    @property
    def has_calls(self) -> bool:
        return bool(self._heard)

    def begin(self) -> None:
        self._heard.clear()
        self._before, self._noted = self._counted(), 0

    def hear(
        self, kind: str, arguments: Iterable[Any], counts: int, adds: str = "", line: str = ""
    ) -> None:
        """Record a call. torch counts it as `counts` calls."""
        with self._lock:
            self._noted += counts
            if len(self._heard) > _MOST_CALLS or kind == "barrier":
                return
        # A call may receive one tensor as both input and output.
        tensors = {id(one): one for given in arguments for one in _tensors(given)}.values()
        memory = [one for tensor in tensors if (one := storage_range(tensor)) is not None]
        elements = sum(tensor.numel() for tensor in tensors)
        known = len(memory) == len(tensors)
        line = line or line_of_call()
        self._heard.append(_Heard(line, kind, memory, elements, known, adds))

    def reduced_twice(self, tensors: Mapping[str, Memory | None]) -> dict[str, tuple[str, str]]:
        """Return the tensors that two all-reduces added over the same ranks, with their lines."""
        found: dict[str, tuple[str, str]] = {}
        before: defaultdict[tuple[str, str], list[tuple[Memory, str]]] = defaultdict(list)
        named: defaultdict[int, list[tuple[str, Memory]]] = defaultdict(list)
        for name, memory in tensors.items():
            if memory is not None:
                named[storage_id(memory)].append((name, memory))
        heard = self._heard if len(self._heard) <= _MOST_CALLS else []
        for call in (call for call in heard if call.adds):
            parts = [
                (name, one)
                for one in call.memory
                for name, mine in named.get(storage_id(one), ())
                if share_bytes(mine, one)
            ]
            for name, one in parts:  # all-reduces of disjoint parts of a tensor add each part once
                for part, line in before[name, call.adds]:
                    if share_bytes(part, one):
                        found.setdefault(name, (line, call.line))
            for name, one in parts:
                before[name, call.adds].append((one, call.line))
        return found

    def ways(
        self,
        tensors: Mapping[str, Sequence[Memory | None]],
        sizes: Mapping[str, int],
        others: Callable[[], Iterable[Memory | None]],
    ) -> CallLines | None:
        """Return the lines that communicated the tensors, each of which may have had several
        storages; None if there were too many calls. `others` returns the storages that are known to
        hold other tensors.
        """
        heard, unheard = list(self._heard), self._counted() - self._before - self._noted
        if len(heard) > _MOST_CALLS:
            return None
        own = [one for memories in tensors.values() for one in memories if one is not None]
        kept = {storage_id(one) for one in own}
        copies = [
            c for c in heard if not c.known or not any(storage_id(m) in kept for m in c.memory)
        ]
        if copies:
            kept = {storage_id(one) for one in others() if one is not None}
            copies = [
                c for c in copies if not (c.known and all(storage_id(m) in kept for m in c.memory))
            ]
        # A scalar carries no tensor with more elements.
        unknown = {""} if unheard else set[str]()
        of_numbers = frozenset({call.line for call in copies} | unknown)
        of_more = frozenset({call.line for call in copies if call.elements > 1} | unknown)
        perhaps = {name: of_numbers if sizes[name] <= 1 else of_more for name in tensors}
        lie: defaultdict[int, list[tuple[Memory, str]]] = defaultdict(list)
        for call in heard:
            for memory in call.memory:
                lie[storage_id(memory)].append((memory, call.line))
        given = {
            name: frozenset(
                line
                for mine in filter(None, memories)
                for memory, line in lie.get(storage_id(mine), ())
                if share_bytes(mine, memory)
            )
            for name, memories in tensors.items()
        }
        if not any(given.values()) and (line := _of_all(copies, sizes, tensors)):
            given = dict.fromkeys(given, frozenset({line}))
        once = {call.line for call in heard if not is_reduction(call.kind)}
        lines = frozenset(call.line for call in heard if is_reduction(call.kind)) - once
        return CallLines(given, perhaps, lines)


def _of_all(
    copies: Sequence[_Heard],
    sizes: Mapping[str, int],
    tensors: Mapping[str, Sequence[Memory | None]],
) -> str:
    """Return the line whose calls may have carried copies of all tensors: its calls only reduce,
    and together received exactly as many elements as the tensors have. Return an empty string if
    there is no such line.
    """
    lines = {call.line for call in copies}
    total = sum(sizes[name] for name, memories in tensors.items() if any(memories))
    whole = total > 1 and sum(call.elements for call in copies) == total
    reduce = all(is_reduction(call.kind) for call in copies)
    return lines.pop() if len(lines) == 1 and whole and reduce else ""


# By rank: ranks that are threads of one process have one each.
HEARING: dict[int, StepCalls] = {}


def start_recording_calls(rank: int, *, past_python: bool) -> StepCalls:
    """Start recording the calls of a rank. `past_python` is True if some calls may bypass the
    recorder, so that only torch knows their number.
    """
    calls = HEARING[rank] = StepCalls(_calls_counted if past_python else None)
    return calls


def _calls_counted() -> float:
    from distcheck.machine import compat  # imports torch, which the front end must not

    try:
        return sum(compat.calls_counted(group) for group in list(compat.groups()))
    except RuntimeError:  # a backend that does not count
        return math.nan  # unknown number


def record_call_of_rank(
    rank: int, kind: str, arguments: Iterable[Any], counts: int, adds: str = ""
) -> None:
    """Record a call of a rank if its calls are recorded. torch counts it as `counts` calls."""
    calls = HEARING.get(rank)
    if calls is not None:
        calls.hear(kind, arguments, counts, adds)


def storage_range(tensor: Any) -> Memory | None:
    """Return the storage of a tensor and the range of its bytes; None if it has no memory."""
    from distcheck.machine import compat  # imports torch, which the front end must not

    try:
        storage, size = compat.weak_storage(tensor), tensor.element_size()
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        begin = tensor.storage_offset() * size
        extent = 1 + sum((length - 1) * stride for length, stride in pairs)
    except Exception:
        return None
    return storage, begin, begin + (extent * size if tensor.numel() else 0)


def storage_id(memory: Memory) -> int:
    """Return a hash that is equal for all ranges of the same storage."""
    return hash(memory[0])


def share_bytes(one: Memory, other: Memory) -> bool:
    """Return True if two storage ranges have a byte in common."""
    return bool(one[0] == other[0]) and one[1] < other[2] and other[1] < one[2]


def _tensors(given: Any, depth: int = _MOST_DEPTH) -> Iterable[Any]:
    if hasattr(given, "untyped_storage"):
        yield given
    elif isinstance(given, list | tuple) and depth:
        for one in given:
            yield from _tensors(one, depth - 1)
