"""What a launcher says to a process that it has started."""

from collections.abc import Mapping
from dataclasses import dataclass

from distcheck.errors import CannotRunError

_MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process of several that were started together.

    rank, world    of this process among the launched ones; `ranks_here` lists the ranks that it
                   is to run, as a rule its own
    local_rank     of the first of them, among the ranks of its machine, which are `local_world`
    meeting        where the processes find each other, by scheme:
                   tcp://HOST:PORT       the process with rank 0 listens there
                   store://HOST:PORT     a TCPStore is there already; rank 0's address is in it
                   file://PATH           rank 0's address is in the file
                   unix://NAME           rank 0 listens on this abstract socket: one machine
    owned          whether the launcher is this process's parent, and its end is that of the run
    restarts       how often the launcher has started them all anew
    run            the launcher's own name for the run, if it has one
    """

    launcher: str
    rank: int
    world: int
    ranks_here: tuple[int, ...]
    local_rank: int
    local_world: int
    meeting: str
    owned: bool = True
    restarts: int = 0
    run: str = ""

    @property
    def is_front(self) -> bool:
        """Whether this process plans, judges and reports; the others lend their ranks."""
        return 0 in self.ranks_here


def number(environ: Mapping[str, str], name: str, *, launcher: str) -> int:
    """A variable that must be a whole number. Raises CannotRunError."""
    text = environ.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        said = f"is {environ[name][:80]!r}" if name in environ else "is missing"
        raise CannotRunError(
            f"{launcher} seems to have started this process, but {name} {said}; it takes a number"
        )
    return int(text)


def local_number(environ: Mapping[str, str], name: str, default: int, *, launcher: str) -> int:
    """A variable that may be missing. Raises CannotRunError for one that is not a number."""
    return number(environ, name, launcher=launcher) if name in environ else default


def tcp(environ: Mapping[str, str]) -> str | None:
    """The meeting that MASTER_ADDR and MASTER_PORT name, if they do."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return f"tcp://{host}:{port}" if host and port else None
