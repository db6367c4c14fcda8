"""What a rank's calls say that torch's flight recorder does not, and in which call the rank waits.

The methods of torch's process groups note reduce operation, root, splits, peer and tag of every
call that goes through Python; `Work.wait` notes that the main thread waits, and for which call.
They keep no tensor. Calls of C++ code (DDP's) are in the flight recorder alone.

`number` of a note is what torch counts calls of a group by, messages included; so the recorder's
entry with the same `op_id` is of the same call.
"""

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcheck.records import posted_calls
from distcheck.worlds.call_log import TENSORS, CallLog, Tensors, dtype_name

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_KEPT = 128  # notes; the flight recorder keeps 64 entries
_MOST_WORKS = 1024  # until those are dropped that are gone
_MOST_FRAMES = 32
_RAISED_IN = "_distcheck_raised_in"  # an attribute of an exception: the call that raised it
_MOST_CAUSES = 16  # of an exception, that are looked at
# What a process group calls an operation: what is noted of it, in the words of `Posted`.
_KINDS = {
    "allreduce": ("all_reduce", "all_reduce"),
    "allreduce_coalesced": ("all_reduce_coalesced", "all_reduce_coalesced"),
    "broadcast": ("broadcast", "broadcast"),
    "reduce": ("reduce", "reduce"),
    "allgather": ("all_gather", "all_gather"),
    "_allgather_base": ("all_gather", "all_gather_into_tensor"),
    "all_gather_single": ("all_gather", "all_gather_into_tensor"),
    "gather": ("gather", "gather"),
    "gather_single": ("gather", "gather_single"),
    "scatter": ("scatter", "scatter"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter"),
    "_reduce_scatter_base": ("reduce_scatter", "reduce_scatter_tensor"),
    "reduce_scatter_single": ("reduce_scatter", "reduce_scatter_tensor"),
    "alltoall": ("all_to_all", "all_to_all"),
    "alltoall_base": ("all_to_all", "all_to_all_single"),
    "all_to_all_single": ("all_to_all", "all_to_all_single"),
    "barrier": ("barrier", "barrier"),
}
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
# What messages are called, and how many arguments torch calls them with.
_MESSAGES = {"send": ("send", 3), "recv": ("recv", 3), "recv_anysource": ("recv", 2)}
MessageKey = tuple[str, str, int, int]  # group, "send" or "recv", peer's place or -1, tag


@dataclass(slots=True)
class Note:
    """A collective: which of a group's calls, and what it was asked. One call of Python's can be
    several of the group's, the first of which is `number`, and the last `until`.
    """

    group: str
    number: int
    until: int
    kind: str
    name: str
    op: Any = None  # torch's; None where it is not known
    root: int | None = None  # its place in the group
    splits: tuple[tuple[int, ...], ...] = ()  # rows that are sent and received


@dataclass(frozen=True, slots=True)
class Message:
    """A send or a receive: the `number`th with this key."""

    key: MessageKey
    number: int
    elements: int
    shape: tuple[int, ...]
    dtype: str
    place: str


class Postings:
    """The notes of this process. `on` is what the main thread waits for, in a list that no other
    wait has, or None.
    """

    def __init__(self) -> None:
        self.notes: deque[Note] = deque(maxlen=_KEPT)
        self.messages: defaultdict[MessageKey, int] = defaultdict(int)
        self.of_group: defaultdict[str, int] = defaultdict(int)  # messages, of any kind
        self.received: defaultdict[tuple[str, int], int] = defaultdict(int)  # by group and tag
        self.on: list[Note | Message] | None = None
        self.after_wait: Callable[[Any], None] = lambda on: None
        self.misses_messages = False  # one was posted in a way that is not known
        self.usual_limit_s = 0.0  # a shorter one of a group's calls is the code's own
        self.log: CallLog | None = None
        self._ranks: dict[str, tuple[Any, tuple[int, ...]]] = {}  # by group's name
        self._works: dict[int, tuple[Any, Note | Message]] = {}
        self._main = threading.main_thread().ident

    def log_no_more(self) -> None:
        """Stops logging, in a process that the rank has forked."""
        self.log = None

    def remember(self, work: Any, what: Note | Message) -> None:
        """Notes of which call a Work is."""
        if work is None:
            return
        if len(self._works) >= _MOST_WORKS:
            self._works = {key: one for key, one in self._works.items() if one[0]() is not None}
        self._works[id(work)] = (weakref.ref(work), what)

    def ranks_of(self, group: Any, name: str) -> tuple[int, ...]:
        """The ranks of the world that a group has, by their places in it."""
        known = self._ranks.get(name)
        if known is None or known[0]() is not group:
            import torch.distributed as dist

            ranks = tuple(dist.distributed_c10d._world.pg_group_ranks[group])
            known = self._ranks[name] = weakref.ref(group), ranks
        return known[1]

    def call_of(self, work: Any) -> Note | Message | None:
        """The call that a Work is of, where it is known."""
        found = self._works.get(id(work))
        return found[1] if found is not None and found[0]() is work else None

    def go_on(self) -> None:
        """Takes back that the main thread waits, if it does, because it posts a call: a handler of
        a signal may do so within a wait that looks by the clock, as MPI's.
        """
        on = self.on
        if on is not None and threading.get_ident() == self._main:
            self.on = None
            self.after_wait(on)

    def wait(self, original: Callable[..., Any], work: Any, given: Any, named: Any) -> Any:
        """Waits for a Work, and says so meanwhile; not where the code has a time limit of its own,
        after which it may go on. A limit of zero is none.
        """
        what = None if any(given) or any(named.values()) else self.call_of(work)
        if what is None or self.on is not None or threading.get_ident() != self._main:
            return original(work, *given, **named)
        on = self.on = [what]
        if self.log is not None:
            self.log.within_call(True)
        try:
            result = original(work, *given, **named)
            if self.log is not None:
                self.log.within_call(False)
        except Exception as error:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(error, _RAISED_IN, what)
            raise
        finally:
            self.on = None
            self.after_wait(on)
        if isinstance(what, Message) and what.key[1] == "recv":
            self.received[what.key[0], what.key[3]] += 1
        return result


def raised_in(error: BaseException | None) -> Note | Message | None:
    """The call whose wait raised an exception, or one that it was raised because of."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        found = getattr(error, _RAISED_IN, None)
        if isinstance(found, Note | Message):
            return found
        error = error.__cause__ or error.__context__
    return None


HERE = Postings()
_installed = False
_log_fd = -1


def is_installed() -> bool:
    """Whether this process notes its calls."""
    return _installed


def install(usual_limit_s: float) -> None:
    """Makes this process note its calls from now on; once, and only where torch offers what it
    takes. A group whose calls time out before `usual_limit_s` has a limit that the code may count
    on.
    """
    global _installed
    HERE.usual_limit_s = usual_limit_s
    if _installed:
        return
    import torch.distributed as dist

    if not hasattr(dist.ProcessGroup, "_get_sequence_number_for_group"):
        return
    _installed = True
    if _log_fd >= 0:
        with contextlib.suppress(OSError):  # where memory is short: then there is no log
            HERE.log = CallLog(_log_fd)
            os.register_at_fork(after_in_child=HERE.log_no_more)
    note_calls_of(dist.ProcessGroup)
    note_waits_of(dist.distributed_c10d.Work)


def log_to(fd: int) -> None:
    """Makes this process log its calls to a file, once it notes them."""
    global _log_fd
    _log_fd = fd


def note_calls_of(group: Any) -> None:
    """Makes the operations that a class of process groups itself has note their calls."""
    for name, (kind, said) in _KINDS.items():
        if name in group.__dict__:
            original = group.__dict__[name]
            setattr(group, name, _collective(original, kind, said, TENSORS[name]))
    for name, (kind, takes) in _MESSAGES.items():
        if name in group.__dict__:
            setattr(group, name, _message(group.__dict__[name], kind, takes))


def note_waits_of(work: Any, *, limited: Callable[[Any], bool] = lambda _: False) -> None:
    """Makes `wait` of a class of Works say that it waits, except for those that are `limited`: that
    raise so soon that the code may have meant it.
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
    tensors: Callable[[Any], tuple[Tensors, Tensors]],
) -> Callable[..., Any]:
    takes_splits = name == "all_to_all_single"

    def post(group: Any, *given: Any, **named: Any) -> Any:
        HERE.go_on()
        before = _count(group)
        options = given[-1] if given else None
        note = Note(
            group=str(group.group_name),
            number=before + 1,
            until=before,
            kind=kind,
            name=name,
            op=getattr(options, "reduceOp", None),
            root=getattr(options, "rootRank", None),
            splits=_splits(given) if takes_splits else (),
        )
        log = HERE.log
        if log is not None and before >= 0:
            with contextlib.suppress(Exception):  # of arguments that torch will refuse
                log.collective(
                    *tensors(given),
                    kind=note.kind,
                    name=note.name,
                    group=note.group,
                    ranks=HERE.ranks_of(group, note.group),
                    number=note.number - HERE.of_group[note.group],
                    place=_place(),
                    op=op_name(note.op),
                    root=note.root,
                    splits=note.splits,
                )
        if log is not None:
            log.within_call(True)
        work = original(group, *given, **named)
        if log is not None:
            log.within_call(False)
        note.until = _count(group)
        if note.until > before >= 0:
            HERE.notes.append(note)
            limits = [posted_calls.own_limit_s(one) for one in (*given[-1:], *named.values())]
            if not any(0 < limit_s < HERE.usual_limit_s for limit_s in limits):
                HERE.remember(work, note)  # after a limit of its own, the code may go on
        return work

    return post


def _message(original: Callable[..., Any], kind: str, takes: int) -> Callable[..., Any]:
    def post(group: Any, *given: Any, **named: Any) -> Any:
        HERE.go_on()
        if named or len(given) != takes:
            HERE.misses_messages = True
            return original(group, *given, **named)
        tensor, tag = given[0][0], int(given[-1])
        key = (str(group.group_name), kind, int(given[1]) if takes == 3 else -1, tag)
        before = _count(group)
        number = HERE.messages[key] = HERE.messages[key] + 1
        HERE.of_group[key[0]] += 1
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        message = Message(key, number, tensor.numel(), shape, dtype, _place())
        log = HERE.log
        if log is not None:
            with contextlib.suppress(Exception):
                log.message(
                    kind=kind,
                    group=key[0],
                    ranks=HERE.ranks_of(group, key[0]),
                    number=number,
                    peer=None if key[2] < 0 else key[2],
                    tag=tag,
                    shape=shape,
                    dtype=dtype,
                    place=message.place,
                )
            log.within_call(True)
        try:
            work = original(group, *given)
        except Exception:
            if _count(group) == before:  # it was refused, and is none
                HERE.messages[key] -= 1
                HERE.of_group[key[0]] -= 1
            raise
        if log is not None:
            log.within_call(False)
        HERE.remember(work, message)
        return work

    return post


def op_name(given: Any) -> str:
    """The name of a reduce operation; empty for one that takes a factor, or none."""
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


def _count(group: Any) -> int:
    """How many calls torch has counted in a group; -1 where it does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1


def _place() -> str:
    """The line of the code under test that called."""
    frame: Any = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return ""
        file = frame.f_code.co_filename
        if is_theirs(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def is_theirs(file: str) -> bool:
    """Whether a file is of the code under test: neither torch's nor distcheck's own."""
    return "/torch/" not in file and not file.startswith((_PACKAGE, "<"))
