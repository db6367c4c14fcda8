"""Records details of a rank's calls that torch's flight recorder lacks, and the call in which the
rank is blocked.

The methods of torch's process groups are wrapped. They record the reduce operation, root, splits,
peer and tag of every call made from Python. `Work.wait` records which call the main thread waits
for. No tensor is kept. Calls made by C++ code (DDP) appear only in the flight recorder.

torch numbers the calls of a group, including messages. The flight recorder's entry with the same
`op_id` describes the same call.
"""

import contextlib
import functools
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distcheck.records import posted_calls
from distcheck.records.posted_calls import PostedCall
from distcheck.worlds import step_calls
from distcheck.worlds.call_log import CallLog
from distcheck.worlds.callers import place_of_caller

_KEPT = 128  # records; the flight recorder keeps 64 entries
_MOST_WORKS = 1024  # until released ones are dropped
_RAISED_IN = "_distcheck_raised_in"  # attribute of an exception: the call that raised it
_MOST_CAUSES = 16  # length of an exception's chain that is searched
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
ADDING = ("SUM", "AVG")
# Point-to-point operations, and the number of arguments in torch's calls of them.
_MESSAGES = {"send": ("send", 3), "recv": ("recv", 3), "recv_anysource": ("recv", 2)}
MessageKey = tuple[str, str, int, int]  # group, "send" or "recv", peer or -1 for any, tag
GivenAndGot = tuple[Sequence[Any], Sequence[Any]]  # tensors
# By the method of a process group: kind and name as in `Posted`, and a function that picks the
# input tensors from the arguments, and the output tensors if they are needed.
_OPERATIONS: dict[str, tuple[str, str, Callable[[Any], GivenAndGot]]] = {
    "allreduce": ("all_reduce", "all_reduce", lambda given: (given[0], ())),
    "allreduce_coalesced": (*2 * ("all_reduce_coalesced",), lambda given: (given[0], ())),
    "broadcast": ("broadcast", "broadcast", lambda given: (given[0], ())),
    "reduce": ("reduce", "reduce", lambda given: (given[0], ())),
    "allgather": ("all_gather", "all_gather", lambda given: (given[1], ())),
    "_allgather_base": ("all_gather", "all_gather_into_tensor", lambda given: (given[1:2], ())),
    "all_gather_single": ("all_gather", "all_gather_into_tensor", lambda given: (given[1:2], ())),
    "gather": ("gather", "gather", lambda given: (given[1], ())),
    "gather_single": ("gather", "gather_single", lambda given: (given[1:2], ())),
    "scatter": ("scatter", "scatter", lambda given: (given[1][0] if given[1] else (), given[0])),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter", lambda given: (given[1][0], ())),
    "_reduce_scatter_base": (
        "reduce_scatter",
        "reduce_scatter_tensor",
        lambda given: (given[1:2], ()),
    ),
    "reduce_scatter_single": (
        "reduce_scatter",
        "reduce_scatter_tensor",
        lambda given: (given[1:2], ()),
    ),
    "alltoall": ("all_to_all", "all_to_all", lambda given: (given[1], given[0])),
    "alltoall_base": ("all_to_all", "all_to_all_single", lambda given: (given[1:2], given[0:1])),
    "all_to_all_single": (
        "all_to_all",
        "all_to_all_single",
        lambda given: (given[1:2], given[0:1]),
    ),
    "barrier": ("barrier", "barrier", lambda given: ((), ())),
}


@dataclass(slots=True)
class NotedCall:
    """A call made from Python. A collective can consist of several calls of torch's numbering,
    `first` to `last` (which includes messages).
    """

    call: PostedCall
    first: int = 0
    last: int = 0


class PostedCalls:
    """The recorded calls of this process. `on` is the list of the calls that the main thread waits
    for; each wait creates a new list. It is None if the main thread does not wait.
    """

    def __init__(self) -> None:
        self.notes: deque[NotedCall] = deque(maxlen=_KEPT)
        self.messages: defaultdict[MessageKey, int] = defaultdict(int)
        self.of_group: defaultdict[str, int] = defaultdict(int)  # messages of any kind
        self.received: defaultdict[tuple[str, int], int] = defaultdict(int)  # by group and tag
        self.on: list[NotedCall] | None = None
        self.after_wait: Callable[[Any], None] = lambda on: None
        self.misses_messages = False  # a message was posted in an unknown way
        self.usual_limit_s = 0.0  # a group's shorter timeout was set by the code
        self.log: CallLog | None = None
        self._ranks: dict[str, tuple[Any, tuple[int, ...], int]] = {}  # by group name
        self._works: dict[int, tuple[Any, NotedCall]] = {}
        self._main = threading.main_thread().ident

    def log_no_more(self) -> None:
        """Stop logging. Called in a process that the rank has forked."""
        self.log = None

    def remember(self, work: Any, noted: NotedCall) -> None:
        if work is None:
            return
        if len(self._works) >= _MOST_WORKS:
            self._works = {key: one for key, one in self._works.items() if one[0]() is not None}
        self._works[id(work)] = (weakref.ref(work), noted)

    def ranks_of(self, group: Any, name: str) -> tuple[tuple[int, ...], int]:
        """Return the global ranks of a group in group order, and the global rank of this process.
        Raises KeyError if torch does not know the group.
        """
        known = self._ranks.get(name)
        if known is None or known[0]() is not group:
            import torch.distributed as dist

            ranks = tuple(dist.get_process_group_ranks(group))
            known = self._ranks[name] = weakref.ref(group), ranks, dist.get_rank()
        return known[1:]

    def call_of(self, work: Any) -> NotedCall | None:
        """Return the call to which a Work belongs; None if it is unknown."""
        found = self._works.get(id(work))
        return found[1] if found is not None and found[0]() is work else None

    def go_on(self) -> None:
        """Retract the report that the main thread waits, because it posts a call. A signal handler
        can post a call during a wait that polls, such as MPI's.
        """
        on = self.on
        if on is not None and threading.get_ident() == self._main:
            self.on = None
            self.after_wait(on)

    def wait(self, original: Callable[..., Any], work: Any, given: Any, named: Any) -> Any:
        """Wait for a Work, and record that the main thread waits. A wait with a timeout chosen by
        the code is not recorded, because the code may continue after it. A timeout of zero means
        none.
        """
        noted = None if any(given) or any(named.values()) else self.call_of(work)
        if noted is None or self.on is not None or threading.get_ident() != self._main:
            return original(work, *given, **named)
        on = self.on = [noted]
        if self.log is not None:
            self.log.within_call(True)
        try:
            result = original(work, *given, **named)
            if self.log is not None:
                self.log.within_call(False)
        except Exception as error:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(error, _RAISED_IN, noted)
            raise
        finally:
            self.on = None
            self.after_wait(on)
        if noted.call.kind == "recv":
            self.received[noted.call.group, noted.call.tag] += 1
        return result


def raised_in(error: BaseException | None) -> NotedCall | None:
    """Return the call in whose wait an exception, or one in its chain, was raised; else None."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        found = getattr(error, _RAISED_IN, None)
        if isinstance(found, NotedCall):
            return found
        error = error.__cause__ or error.__context__
    return None


HERE = PostedCalls()
_installed = False
_log_fd = -1


def is_installed() -> bool:
    return _installed


def install(usual_limit_s: float) -> None:
    """Make this process record its calls from now on. Has an effect only once, and only if torch
    has the required methods. A group with a timeout shorter than `usual_limit_s` has a timeout that
    the code may rely on.
    """
    global _installed
    HERE.usual_limit_s = usual_limit_s
    if _installed:
        return
    import torch.distributed as dist

    from distcheck.machine import compat  # imports torch, which the front end must not

    if not compat.counts_calls():
        return
    _installed = True
    if _log_fd >= 0:
        with contextlib.suppress(OSError):  # if memory is short, there is no log
            HERE.log = CallLog(_log_fd)
            os.register_at_fork(after_in_child=HERE.log_no_more)
    note_calls_of(dist.ProcessGroup)
    note_waits_of(dist.distributed_c10d.Work)


def log_to(fd: int) -> None:
    """Make this process log its calls to a file while it records them."""
    global _log_fd
    _log_fd = fd


def note_calls_of(group: Any) -> None:
    """Make the operations of a process group class record their calls."""
    for name, (kind, called, tensors) in _OPERATIONS.items():
        if name in group.__dict__:
            setattr(group, name, _collective(group.__dict__[name], kind, called, tensors))
    for name, (kind, takes) in _MESSAGES.items():
        if name in group.__dict__:
            setattr(group, name, _message(group.__dict__[name], kind, takes))


def note_waits_of(work: Any, *, limited: Callable[[Any], bool] = lambda _: False) -> None:
    """Make the method `wait` of a Work class record waits. Waits for which `limited` is true are
    not recorded: their timeout is so short that the code may have intended it.
    """
    original = work.wait

    def wait(self: Any, *given: Any, **named: Any) -> Any:
        if limited(self):
            return original(self, *given, **named)
        return HERE.wait(original, self, given, named)

    work.wait = wait


def _collective(
    original: Callable[..., Any],
    kind: str,
    name: str,
    tensors: Callable[[Any], GivenAndGot],
) -> Callable[..., Any]:
    def post(group: Any, *given: Any, **named: Any) -> Any:
        HERE.go_on()
        before = _count(group)
        log, noted = HERE.log, None
        with contextlib.suppress(Exception):  # for arguments that torch will refuse
            ranks, call = _posted(group, kind, name, before, given, tensors(given))
            noted = NotedCall(call, before + 1, before)
            if log is not None and before >= 0:
                log.write(ranks, call)
        if log is not None:
            log.within_call(True)
        work = original(group, *given, **named)
        if log is not None:
            log.within_call(False)
        after = _count(group)
        if noted is not None and after > before >= 0:
            noted.last = after
            adds = str(ranks) if len(ranks) > 1 and noted.call.op in ADDING else ""
            step_calls.record_call_of_rank(
                noted.call.rank, kind, given, after - before, adds * (kind == "all_reduce")
            )
            HERE.notes.append(noted)
            limits = [posted_calls.call_timeout_s(one) for one in (*given[-1:], *named.values())]
            if not any(0 < limit_s < HERE.usual_limit_s for limit_s in limits):
                HERE.remember(work, noted)  # after its own timeout, the code may continue
        return work

    return post


def _posted(
    group: Any,
    kind: str,
    name: str,
    before: int,
    given: tuple[Any, ...],
    tensors: GivenAndGot,
) -> tuple[tuple[int, ...], PostedCall]:
    """Return the ranks of a group, and the record of its collective number `before` + 1."""
    group_name = str(group.group_name)
    ranks, rank = HERE.ranks_of(group, group_name)
    sent, received = ([tuple(tensor.shape) for tensor in some] for some in tensors)
    first = next((tensor for some in tensors for tensor in some), None)
    options = given[-1] if given else None
    call = PostedCall(
        kind=kind,
        name=name,
        rank=rank,
        group=group_name,
        number=before + 1 - HERE.of_group[group_name],
        counts=posted_calls.counts_that_must_match(kind, sent, received),
        dtype="" if first is None else _dtype_name(first.dtype),
        sizes=tuple(sent or received),
        place=place_of_caller(),
    )
    if posted_calls.is_reduction(kind):
        call.op = _op_name(getattr(options, "reduceOp", None))
        call.known = bool(call.op)
    if posted_calls.has_root(kind):
        root = getattr(options, "rootRank", None)
        call.root = None if root is None else ranks[root]
        call.known &= root is not None
    if kind == "all_to_all":
        rows = _splits(given) if name == "all_to_all_single" else ()
        splits = posted_calls.all_to_all_splits(name, rows, sent, received, len(ranks))
        call.in_splits, call.out_splits = splits
        call.known = bool(call.in_splits)
    return ranks, call


def _message(original: Callable[..., Any], kind: str, takes: int) -> Callable[..., Any]:
    def post(group: Any, *given: Any, **named: Any) -> Any:
        HERE.go_on()
        group_name = str(group.group_name)
        ranks: tuple[int, ...] = ()
        with contextlib.suppress(Exception):
            ranks, rank = HERE.ranks_of(group, group_name)
        if named or len(given) != takes or not ranks:
            HERE.misses_messages = True
            return original(group, *given, **named)
        tensor, tag = given[0][0], int(given[-1])
        place = int(given[1]) if takes == 3 else -1
        peer = ranks[place] if 0 <= place < len(ranks) else -1
        key = (group_name, kind, peer, tag)
        before = _count(group)
        HERE.messages[key] += 1
        HERE.of_group[group_name] += 1
        call = PostedCall(
            kind=kind,
            name=kind,
            rank=rank,
            group=group_name,
            number=HERE.messages[key],
            peer=None if place < 0 else peer,
            tag=tag,
            counts=(tensor.numel(),),
            dtype=_dtype_name(tensor.dtype),
            sizes=(tuple(tensor.shape),),
            place=place_of_caller(),
        )
        log = HERE.log
        if log is not None:
            log.write(ranks, call)
            log.within_call(True)
        try:
            work = original(group, *given)
        except Exception:
            if _count(group) == before:  # the call was refused, so it is not recorded
                HERE.messages[key] -= 1
                HERE.of_group[group_name] -= 1
            raise
        if log is not None:
            log.within_call(False)
        step_calls.record_call_of_rank(rank, kind, given[:1], max(0, _count(group) - before))
        HERE.remember(work, NotedCall(call))
        return work

    return post


def _op_name(given: Any) -> str:
    """Return the name of a reduce operation; empty for None or an operation with a factor."""
    if given is None:
        return ""
    for name, op in _ops():
        if given == op:
            return name
    return ""


@functools.cache
def _ops() -> list[tuple[str, Any]]:
    import torch.distributed as dist

    return [(name, getattr(dist.ReduceOp, name)) for name in _OPS]


def _splits(given: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    received, sent = given[2:4] if len(given) > 3 else ((), ())
    return (tuple(sent), tuple(received)) if sent and received else ()


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _count(group: Any) -> int:
    from distcheck.machine import compat  # imports torch, which the front end must not

    try:
        return compat.calls_counted(group)
    except RuntimeError:
        return -1
