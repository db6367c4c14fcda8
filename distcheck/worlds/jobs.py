"""Defines the `Job` type: work that a forked process can be asked to do.

Each package declares its own jobs; this module imports none of them. The front end holds the
declaration, which imports nothing heavy; the process that runs the job imports the function that
the declaration names.
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
Descriptors = Mapping[str, int]  # of a job, by name; only those that were passed
STORE = "store"  # the store in which the ranks of a world meet; every rank receives it


@dataclass(frozen=True)
class Job(Generic[Asked, Answer]):
    """A job: the function that runs it ("module:name"), the types of its request and result, and
    the names of the descriptors that it accepts. `bytes` and None are sent without encoding.
    """

    target: str
    request: type[Asked]
    result: type[Answer]
    descriptors: tuple[str, ...] = ()

    def does(
        self, function: Callable[[Asked, Descriptors, Reporter], Answer]
    ) -> Callable[[bytes, Descriptors, Reporter], bytes]:
        """Register the function of the job, as a decorator. Raises TypeError for another name."""
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
        """Decode a received result. Raises AnswerError for invalid data: the result may depend on
        the code under test, and one bad number must not end the run.
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
