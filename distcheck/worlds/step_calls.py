"""Through which lines of the code under test the tensors of a rank go while a step is recorded.

Every collective and message that is noted (`postings`, `simulated/world`) is heard here as well. Of
its tensors only storages are kept, by weak references: these keep no memory, and none is taken for
another that lies where it lay. A call counts only where the code under test makes it itself: one
that torch's own code makes, and one of C++ code, has no line.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcheck.records.posted_calls import reduces
from distcheck.worlds.callers import line_of_call

_MOST_CALLS = 4096  # of a step
_MOST_DEPTH = 3  # of lists in the arguments of a call
Memory = tuple[Any, int, int]  # a storage, and which of its bytes


@dataclass(slots=True)
class _Heard:
    line: str
    kind: str
    memory: list[Memory]
    elements: int
    known: bool  # whether all of its tensors have a storage


@dataclass(frozen=True)
class CallLines:
    """What is known of tensors by name: the lines of the calls that were given any of their memory,
    and of those that may have carried copies of them. Where none was given any, the only line that
    was given copies of all counts as one that was given each. `reducing` are the lines that only
    reduce.
    """

    given: Mapping[str, frozenset[str]]
    perhaps: Mapping[str, frozenset[str]]
    reducing: frozenset[str]


class StepCalls:
    """The calls of one rank since a step began. `counted` says how many calls torch has counted,
    where some may go past Python.
    """

    def __init__(self, counted: Callable[[], float] | None = None) -> None:
        self._counted = counted or (lambda: 0)
        self._before, self._noted = self._counted(), 0
        self._heard: list[_Heard] = []
        self._lock = threading.Lock()

    def begin(self) -> None:
        self._heard.clear()
        self._before, self._noted = self._counted(), 0

    def hear(self, kind: str, arguments: Iterable[Any], counts: int) -> None:
        """A call is made, which counts so many times."""
        with self._lock:
            self._noted += counts
            if len(self._heard) > _MOST_CALLS or kind == "barrier":
                return
        # A call may be given one tensor twice, to read it and to write it.
        tensors = {id(one): one for given in arguments for one in _tensors(given)}.values()
        memory = [one for tensor in tensors if (one := memory_of(tensor)) is not None]
        elements = sum(tensor.numel() for tensor in tensors)
        known = len(memory) == len(tensors)
        self._heard.append(_Heard(line_of_call(), kind, memory, elements, known))

    def ways(
        self,
        tensors: Mapping[str, Sequence[Memory | None]],
        sizes: Mapping[str, int],
        others: Callable[[], Iterable[Memory | None]],
    ) -> CallLines | None:
        """Which way tensors went, each of which may have lain in several memories; None where too
        much was called. `others` gives the memories that are known to hold something else.
        """
        heard, unheard = list(self._heard), self._counted() - self._before - self._noted
        if len(heard) > _MOST_CALLS:
            return None
        own = [one for memories in tensors.values() for one in memories if one is not None]
        kept = {id_of(one) for one in own}
        copies = [c for c in heard if not c.known or not any(id_of(m) in kept for m in c.memory)]
        if copies:
            kept = {id_of(one) for one in others() if one is not None}
            copies = [
                c for c in copies if not (c.known and all(id_of(m) in kept for m in c.memory))
            ]
        # A single number carries no tensor that has more.
        unknown = {""} if unheard else set[str]()
        of_numbers = frozenset({call.line for call in copies} | unknown)
        of_more = frozenset({call.line for call in copies if call.elements > 1} | unknown)
        perhaps = {name: of_numbers if sizes[name] <= 1 else of_more for name in tensors}
        lie: defaultdict[int, list[tuple[Memory, str]]] = defaultdict(list)
        for call in heard:
            for memory in call.memory:
                lie[id_of(memory)].append((memory, call.line))
        given = {
            name: frozenset(
                line
                for mine in filter(None, memories)
                for memory, line in lie.get(id_of(mine), ())
                if overlap(mine, memory)
            )
            for name, memories in tensors.items()
        }
        if not any(given.values()) and (line := _of_all(copies, sizes, tensors)):
            given = dict.fromkeys(given, frozenset({line}))
        once = {call.line for call in heard if not reduces(call.kind)}
        lines = frozenset(call.line for call in heard if reduces(call.kind)) - once
        return CallLines(given, perhaps, lines)


def _of_all(
    copies: Sequence[_Heard],
    sizes: Mapping[str, int],
    tensors: Mapping[str, Sequence[Memory | None]],
) -> str:
    """The line of all calls that may have carried copies, if these reduce and were together given
    exactly as many elements as all tensors have.
    """
    lines = {call.line for call in copies}
    total = sum(sizes[name] for name, memories in tensors.items() if any(memories))
    whole = total > 1 and sum(call.elements for call in copies) == total
    reduce = all(reduces(call.kind) for call in copies)
    return lines.pop() if len(lines) == 1 and whole and reduce else ""


# By rank: each of those that are threads of one process has its own.
HEARING: dict[int, StepCalls] = {}


def listen(rank: int, *, past_python: bool) -> StepCalls:
    """From now on hears the calls of a rank; `past_python`, where some may go past what is noted,
    of which torch knows the number.
    """
    calls = HEARING[rank] = StepCalls(_calls_counted if past_python else None)
    return calls


def _calls_counted() -> float:
    from distcheck.machine import compat  # imports torch, which the front must not

    try:
        return sum(compat.calls_counted(group) for group in list(compat.groups()))
    except RuntimeError:  # a backend that does not count
        return math.nan  # the number is not known


def hear(rank: int, kind: str, arguments: Iterable[Any], counts: int) -> None:
    """Notes a call of a rank that is listened to, which torch counts so many times."""
    calls = HEARING.get(rank)
    if calls is not None:
        calls.hear(kind, arguments, counts)


def memory_of(tensor: Any) -> Memory | None:
    """Where a tensor lies; None where it has no memory of its own."""
    from distcheck.machine import compat  # imports torch, which the front must not

    try:
        storage, size = compat.weak_storage(tensor), tensor.element_size()
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        begin = tensor.storage_offset() * size
        extent = 1 + sum((length - 1) * stride for length, stride in pairs)
    except Exception:
        return None
    return storage, begin, begin + (extent * size if tensor.numel() else 0)


def id_of(memory: Memory) -> int:
    """What two memories of one storage have alike."""
    return hash(memory[0])


def overlap(one: Memory, other: Memory) -> bool:
    """Whether two memories share a byte."""
    return bool(one[0] == other[0]) and one[1] < other[2] and other[1] < one[2]


def _tensors(given: Any, depth: int = _MOST_DEPTH) -> Iterable[Any]:
    if hasattr(given, "untyped_storage"):
        yield given
    elif isinstance(given, list | tuple) and depth:
        for one in given:
            yield from _tensors(one, depth - 1)
