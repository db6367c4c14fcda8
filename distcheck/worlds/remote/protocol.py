"""What the front and the processes on other machines say to each other, over one connection each.

host -> front    Coming, Hello, DataPrepared; of its ranks Of, Written, and Signs of life
front -> host    Prepare, StartRanks, ToRanks; Beat; Over

Either side that hears nothing for the deadline holds the other for lost.
"""

import socket
from typing import Any, Literal

import msgspec

from distcheck.worlds.framing import Line
from distcheck.worlds.messages import Of

PROTOCOL = 6  # counts up with every change of a message below
SIGN_EVERY_S = 0.25


class Joining(msgspec.Struct, tag=True):
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


class Written(msgspec.Struct, tag=True):
    """Part of what a rank that is gone has written into its trace."""

    world: int
    rank: int
    offset: int
    data: bytes


class Signs(msgspec.Struct, tag=True):
    """A sign of life, with that of the ranks: busy seconds, which are awake, which stopped."""

    world: int
    busy_s: dict[int, float]
    awake: tuple[int, ...]
    stopped: tuple[int, ...] = ()


class DataPrepared(msgspec.Struct, tag=True):
    """The data set was read, or not."""

    description: bytes
    error: str = ""


class Prepare(msgspec.Struct, tag=True):
    """Read a data set."""

    name: str
    data_dir: str
    download: bool


class GivenThere(msgspec.Struct, frozen=True):
    """What a rank is given in place of a descriptor of the front's; see `shares.Shared`."""

    name: str
    kind: str
    key: str
    size: int


class RankToStart(msgspec.Struct, frozen=True):
    """One rank to start; `regions` (offset, length) of the first trace are sent when it is gone."""

    rank: int
    payload: bytes
    environment: dict[str, str]
    regions: tuple[tuple[int, int], ...]


class StartRanks(msgspec.Struct, tag=True):
    """Start a share of a world. `world` numbers worlds, so that late words of one are known."""

    world: int
    target: str
    ranks: tuple[RankToStart, ...]
    given: tuple[GivenThere, ...]


class ToRanks(msgspec.Struct, tag=True):
    """Of a world's ranks there: send a signal to one (`rank`, `number`), have all tell what they
    are doing, let those that are done leave, or end what is left of them and forget them.
    """

    world: int
    do: Literal["signal", "ask", "release", "close"]
    rank: int = -1
    number: int = 0


class Heartbeat(msgspec.Struct, tag=True):
    """A sign of life of the front's."""


class Shutdown(msgspec.Struct, tag=True):
    """The verdict: leave with this code."""

    exit_code: int
    summary: str


FromHost = Joining | Hello | Of | Written | Signs | DataPrepared
FromFront = Prepare | StartRanks | ToRanks | Heartbeat | Shutdown


class Connection(Line):
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
