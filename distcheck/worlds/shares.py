"""The ranks of a world that live in one place, and what a world asks of that place.

A world on one machine has one share; under a launcher that spans processes or machines it has
one for each of them (`coordinator.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.local.children import Child

Region = tuple[int, int]  # offset and length, in bytes


class Readable(Protocol):
    """What a selector takes."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A descriptor that every rank is given, and what stands for it on another machine.

    `trace`  memory of `size` bytes; what rank r may have written lies in `regions(r)`
    `data`   the data set that was prepared last
    `none`   nothing there can stand for it, and only rank 0 uses it
    """

    fd: int
    kind: Literal["none", "data", "trace"] = "none"
    key: str = ""
    size: int = 0
    regions: Callable[[int], Sequence[Region]] = field(default=lambda rank: ())


def descriptors_of(fds: Mapping[str, Shared]) -> dict[str, int]:
    return {name: given.fd for name, given in fds.items()}


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """What one rank is started with: `fds` are of this rank alone, by the job's names, and the
    variables that `named_fds` names will hold descriptors' numbers.

    `interpreter` is the number of the further interpreter that it is forked from (None: the
    helper), `order_seed` that of the order of its environment variables (None: as they come).
    """

    payload: bytes
    environment: Mapping[str, str]
    fds: Descriptors = field(default_factory=dict)
    named_fds: Mapping[str, int] = field(default_factory=dict)
    interpreter: int | None = None
    order_seed: int | None = None


class Share(Protocol):
    """Some ranks of a world, and the place where they are."""

    children: dict[int, Child]  # by rank

    def look(self) -> None:
        """Takes note of what its children cannot say, before a world looks at them."""
        return

    def signal(self, child: Child, number: int) -> None:
        """Sends a signal to a rank, if it is still there."""
        ...

    def ask(self) -> None:
        """Makes every rank tell what it is doing."""
        ...

    def release(self) -> None:
        """Lets ranks that are done leave."""
        ...

    def close(self) -> None:
        """Frees what the share holds; its ranks are gone, or were ended as far as they can be."""
        ...
