"""Defines `Job`, a function that a forked process can be asked to run, and `Reporter`, the
connection of that process to the front end.

Each package declares its own jobs; this module imports none of them. The front end imports only the
declaration, which is cheap. The process that runs the job imports the function that the declaration
names.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from distcheck.errors import AnswerError
from distcheck.worlds import messages
from distcheck.worlds.framing import frame, write_all

leave = os._exit  # a child replaces os._exit by a function that reports the exit


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class Reporter:
    """A child's connection to the front end. Its methods may be called from any thread."""

    def __init__(self, events_fd: int) -> None:
        self._fd = events_fd
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Set by a job that collects its own stacks.
        self.tell_stacks: Callable[[], None] | None = None

    def send(self, event: messages.AnyEvent, *, patience_s: float = -1) -> None:
        """Send one event. If the front end has exited, the event is dropped without an error. With
        `patience_s`, give up if the send of another thread takes longer. A process that the rank
        has forked exits here, because it must not run code that is meant for the rank only.
        """
        if os.getpid() != self._pid:
            sys.stderr.write(
                "distcheck: a forked child of this rank continued as if it were the rank\n"
            )
            flush()
            leave(0)
        if not self._lock.acquire(timeout=patience_s):
            return
        try:
            write_all(self._fd, frame(event))
        except BrokenPipeError:
            leave(1)
        finally:
            self._lock.release()

    def progress(self, step: int, phase: str) -> None:
        """Report that a phase of a step begins. This is the heartbeat that deadlines watch."""
        self.send(messages.Progress(step, phase))

    def say(self, payload: bytes) -> None:
        """Send a payload that only the code that started this job understands."""
        self.send(messages.UserMessage(payload))


Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Descriptors = Mapping[str, int]  # of a job, by name; only those that were passed
STORE = "store"  # the store in which the ranks of a world meet; every rank receives it


@dataclass(frozen=True)
class Job(Generic[Asked, Answer]):
    """Declaration of a job: the function that runs it ("module:name"), the types of its request and
    its result, and the names of the descriptors that it accepts. `bytes` and None are sent without
    encoding.
    """

    target: str
    request: type[Asked]
    result: type[Answer]
    descriptors: tuple[str, ...] = ()

    def does(
        self, function: Callable[[Asked, Descriptors, Reporter], Answer]
    ) -> Callable[[bytes, Descriptors, Reporter], bytes]:
        """Register the function of the job, as a decorator. Raises TypeError if its name is not the
        declared one.
        """
        if (name := f"{function.__module__}:{function.__qualname__}") != self.target:
            raise TypeError(f"{name} does a job whose target is {self.target}")
        # Created at import: once in the helper for all of its forks (3 ms each).
        request = None if self.request is bytes else msgspec.msgpack.Decoder(self.request)

        @functools.wraps(function)
        def run(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
            asked: Any = payload if request is None else request.decode(payload)
            return _encoded(function(asked, fds, reporter))

        return run

    def encode(self, request: Asked) -> bytes:
        assert isinstance(request, self.request), f"{self.target} is asked a {self.request}"
        return _encoded(request)

    def decode(self, answer: bytes) -> Answer:
        """Decode a received result. Raises AnswerError for invalid data, instead of ending the run,
        because the code under test may influence the result.
        """
        if self.result is bytes:
            return answer  # type: ignore[return-value]
        try:
            return msgspec.msgpack.decode(answer, type=self.result)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise AnswerError(f"the answer of {self.target} cannot be read: {error}") from error

    def accept(self, given: Mapping[str, object]) -> None:
        """Raise TypeError for descriptors that the job does not declare."""
        if unknown := given.keys() - {*self.descriptors}:
            raise TypeError(f"{self.target} takes no descriptor {', '.join(sorted(unknown))}")


def _encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError) as error:  # a number or text of the code under test
        raise AnswerError(f"an answer cannot be sent: {error}") from error


# -- further state that each rank of a simulated world owns ----------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAME = "distcheck_of_each_rank"


class MissingAttribute:
    """Type of the marker for an attribute that does not exist."""


ABSENT = MissingAttribute()


@dataclass(frozen=True)
class PerRankAttributes:
    """Attributes that each rank owns, as (object, name), and a function that returns their initial
    values for one rank.
    """

    places: Sequence[tuple[Any, str]] = ()
    begin: Callable[[], Sequence[Any]] = tuple

    def read(self) -> list[Any]:
        return [getattr(owner, name, ABSENT) for owner, name in self.places]

    def write(self, values: Sequence[Any]) -> None:
        for (owner, name), value in zip(self.places, values, strict=True):
            if value is not ABSENT:
                setattr(owner, name, value)
            elif hasattr(owner, name):
                delattr(owner, name)


def with_rank_state(find: Callable[[], PerRankAttributes]) -> Callable[[_Function], _Function]:
    """Declare the per-rank attributes of a job, as a decorator of the function that runs it. `find`
    is called just before the ranks begin.
    """

    def declare(function: _Function) -> _Function:
        setattr(function, _NAME, find)
        return function

    return declare


def owned_by(function: Callable[..., Any]) -> PerRankAttributes:
    find: Callable[[], PerRankAttributes] = getattr(function, _NAME, PerRankAttributes)
    return find()
