"""What a forked process can be asked to do: jobs, each of which is declared once, by its room.

The front holds the declaration, which imports nothing heavy, and the process that does the job
imports the function that it names. This module knows what a job is, and no job.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from distcheck.errors import AnswerError
from distcheck.worlds.reporter import Reporter

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Descriptors = Mapping[str, int]  # a job's own, by name; only those that were given
STORE = "store"  # where ranks meet, which every rank of a world is given


@dataclass(frozen=True)
class Job(Generic[Asked, Answer]):
    """A job: the function that does it ("module:name"), what it is asked and answers, and the names
    of the descriptors that it may be given. `bytes` and None travel as they are.
    """

    target: str
    request: type[Asked]
    result: type[Answer]
    descriptors: tuple[str, ...] = ()

    def does(
        self, function: Callable[[Asked, Descriptors, Reporter], Answer]
    ) -> Callable[[bytes, Descriptors, Reporter], bytes]:
        """Declares the function that does the job, as a decorator. Raises TypeError for another
        than `target` names.
        """
        if (name := f"{function.__module__}:{function.__qualname__}") != self.target:
            raise TypeError(f"{name} does a job whose target is {self.target}")
        # Made where the function is imported: in the helper, for all that it forks (3 ms each).
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
        """An answer that came. Raises AnswerError for anything else: what a process computes may
        depend on judged code, and one number of it ends no run.
        """
        if self.result is bytes:
            return answer  # type: ignore[return-value]
        try:
            return msgspec.msgpack.decode(answer, type=self.result)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise AnswerError(f"the answer of {self.target} cannot be read: {error}") from error

    def accept(self, given: Mapping[str, object]) -> None:
        """Raises TypeError for descriptors that the job does not know."""
        if unknown := given.keys() - {*self.descriptors}:
            raise TypeError(f"{self.target} takes no descriptor {', '.join(sorted(unknown))}")


def _encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError) as error:  # a number, or a text of judged code
        raise AnswerError(f"an answer cannot be sent: {error}") from error
