"""Further per-rank state of a job, in addition to that of `isolation.py`. A job declares it by
`of_each_rank` on the function that runs it. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAME = "distcheck_of_each_rank"


class Absent:
    """Type of the marker for a missing attribute."""


ABSENT = Absent()


@dataclass(frozen=True)
class Owned:
    """Attributes as (object, name), and a function for one rank's initial values."""

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
    """Declare a job's per-rank state; `find` is called just before its ranks begin."""

    def declare(function: _Function) -> _Function:
        setattr(function, _NAME, find)
        return function

    return declare


def owned_by(function: Callable[..., Any]) -> Owned:
    find: Callable[[], Owned] = getattr(function, _NAME, Owned)
    return find()
