"""Interface between a world and a place that runs some of its ranks (a share of the world).

A world on one machine has one share. Under a launcher that spans processes or machines, it has one
share for each of them (`coordinator.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.local.children import Child

Region = tuple[int, int]  # offset and length, in bytes


class Readable(Protocol):
    """An object that a selector accepts."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A descriptor that every rank receives, and its replacement on another machine.

    `trace`  memory of `size` bytes; rank r writes only within `regions(r)`
    `data`   the data set that was prepared last
    `none`   no replacement; only rank 0 uses it
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
    """Start of one rank. `fds` are descriptors for this rank only, by the job's names. Each
    variable in `named_fds` is set to the number of its descriptor.

    `interpreter` is the number of the further interpreter that forks the rank (None: the helper).
    `order_seed` determines the order of its environment variables (None: unchanged).
    """

    payload: bytes
    environment: Mapping[str, str]
    fds: Descriptors = field(default_factory=dict)
    named_fds: Mapping[str, int] = field(default_factory=dict)
    interpreter: int | None = None
    order_seed: int | None = None


class LauncherJob(Protocol):
    """A job that another launcher has started, and that the ranks of a world become part of."""

    def enlist(self, rank: int, start: RankStart) -> RankStart:
        """Return the start of a rank, with the environment and descriptors of its place added."""
        ...

    def let_go_of_connections(self) -> None:
        """Close this process's copies of the descriptors that the ranks have received."""
        ...

    def close(self) -> None:
        """End the launcher and all processes that it has started; wait until they have exited."""
        ...


class Share(Protocol):
    """Ranks of a world that run in the same place."""

    children: dict[int, Child]  # by rank

    def look(self) -> None:
        """Update state that the children cannot report. Called before a world examines them."""
        return

    def signal(self, child: Child, number: int) -> None:
        """Send a signal to a rank, if the rank is still running."""
        ...

    def ask(self) -> None:
        """Make every rank report its stacks."""
        ...

    def release(self) -> None:
        """Let finished ranks exit."""
        ...

    def close(self) -> None:
        """Free the share's resources. Its ranks have exited, or were ended as far as possible."""
        ...
