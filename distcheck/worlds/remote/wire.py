"""What the front and the processes on other machines say to each other, over one connection each.

host -> front    Coming, Hello, then of its ranks Started, Came, Printed, Written, Gone; Signs
front -> host    Prepare, StartRanks, SignalRank, AskRanks, ReleaseRanks, CloseRanks; Beat; Over

Either side that hears nothing for the deadline holds the other for lost.
"""

import socket
from typing import Any

import msgspec

from distcheck.worlds import messages
from distcheck.worlds.call_log import LoggedCall
from distcheck.worlds.framing import Line

PROTOCOL = 5  # counts up with every change of a message below
SIGN_EVERY_S = 0.25


class Coming(msgspec.Struct, tag=True):
    """First words: who this is, before torch has been imported. `error`: it cannot take part."""

    protocol: int
    ranks: tuple[int, ...]
    world: int
    host: str
    error: str = ""


class Hello(msgspec.Struct, tag=True):
    """Ready to fork. `identity` is what must be the same everywhere, by name: versions, digests."""

    identity: dict[str, str]
    error: str = ""


class Started(msgspec.Struct, tag=True):
    """A rank was forked, or not."""

    world: int
    rank: int
    pid: int
    error: str = ""


class Came(msgspec.Struct, tag=True):
    """A rank said something, `age_s` ago: clocks of two machines have nothing in common."""

    world: int
    rank: int
    age_s: float
    event: messages.Event


class Printed(msgspec.Struct, tag=True):
    """A rank wrote to its output."""

    world: int
    rank: int
    data: bytes


class Written(msgspec.Struct, tag=True):
    """Part of what a rank that is gone has written into its trace."""

    world: int
    rank: int
    offset: int
    data: bytes


class Gone(msgspec.Struct, tag=True):
    """A rank is gone, and everything it has written was sent."""

    world: int
    rank: int
    code: int | None
    signal: int | None
    stacks: str
    called: list[LoggedCall]


class Signs(msgspec.Struct, tag=True):
    """A sign of life, with that of the ranks: busy seconds, which are awake, which stopped."""

    world: int
    busy_s: dict[int, float]
    awake: tuple[int, ...]
    stopped: tuple[int, ...] = ()


class Prepared(msgspec.Struct, tag=True):
    """The data set was read, or not."""

    description: bytes
    error: str = ""


class Prepare(msgspec.Struct, tag=True):
    """Read a data set."""

    name: str
    data_dir: str
    download: bool


class Given(msgspec.Struct, frozen=True):
    """What a rank is given in place of a descriptor of the front's; see `shares.Shared`."""

    name: str
    kind: str
    key: str
    size: int


class RankOrder(msgspec.Struct, frozen=True):
    """One rank to start; `regions` (offset, length) of the first trace are sent when it is gone."""

    rank: int
    payload: bytes
    environment: dict[str, str]
    regions: tuple[tuple[int, int], ...]


class StartRanks(msgspec.Struct, tag=True):
    """Start a share of a world. `world` numbers worlds, so that late words of one are known."""

    world: int
    target: str
    ranks: tuple[RankOrder, ...]
    given: tuple[Given, ...]


class SignalRank(msgspec.Struct, tag=True):
    """Send a signal to a rank."""

    world: int
    rank: int
    number: int


class AskRanks(msgspec.Struct, tag=True):
    """Have them tell what they are doing."""

    world: int


class ReleaseRanks(msgspec.Struct, tag=True):
    """Let those that are done leave."""

    world: int


class CloseRanks(msgspec.Struct, tag=True):
    """End what is left of them and forget them."""

    world: int


class Beat(msgspec.Struct, tag=True):
    """A sign of life of the front's."""


class Over(msgspec.Struct, tag=True):
    """The verdict: leave with this code."""

    exit_code: int
    summary: str


FromHost = Coming | Hello | Started | Came | Printed | Written | Gone | Signs | Prepared
FromFront = Prepare | StartRanks | SignalRank | AskRanks | ReleaseRanks | CloseRanks | Beat | Over


class Wire(Line):
    """One end of a connection between machines. Sends block, for at most `patience_s`."""

    receive_bytes = 1 << 20

    def __init__(self, connection: socket.socket, kind: Any, *, patience_s: float) -> None:
        super().__init__(connection, kind)
        connection.settimeout(patience_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def be_patient(self, patience_s: float) -> None:
        """Changes how long a send, or an arrival of which nothing is there, may take."""
        self._connection.settimeout(patience_s)

    @property
    def own_address(self) -> str:
        """The address of this end; empty for a socket of this machine's own kind."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        return str(self._connection.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The address of the other end; empty where it is on this machine."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        address = str(self._connection.getpeername()[0])
        return "" if address in ("127.0.0.1", "::1", self.own_address) else address
