"""What a job has of its own on every rank, beside what `isolation.py` exchanges for all jobs.

A job says so by `of_each_rank`, on the function that does it. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAME = "distcheck_of_each_rank"


class Absent:
    """Stands for an attribute that is not there."""


ABSENT = Absent()


@dataclass(frozen=True)
class Owned:
    """Attributes as (object, name), and a function that makes one rank's first values of them."""

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


def of_each_rank(find: Callable[[], Owned]) -> Callable[[_Function], _Function]:
    """Declares what a job's ranks own, which `find` looks for just before they begin."""

    def declare(function: _Function) -> _Function:
        setattr(function, _NAME, find)
        return function

    return declare


def owned_by(function: Callable[..., Any]) -> Owned:
    find: Callable[[], Owned] = getattr(function, _NAME, Owned)
    return find()
