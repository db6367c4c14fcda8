"""Protocol between the front end and the processes on other machines, over one connection each.

agent -> front end    Joining, Hello, DataPrepared; per rank RoutedEvent, Written, RankHeartbeat
front end -> agent    Prepare, StartRanks, ToRanks; Heartbeat, Shutdown

Each side declares its peer dead if no heartbeat arrives within the deadline.
"""

import socket
import threading
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from distcheck.worlds.framing import MOST_BYTES, Frames, Line
from distcheck.worlds.messages import RoutedEvent
from distcheck.worlds.remote import secret

PROTOCOL = 7  # incremented by every change of a message below
SIGN_EVERY_S = 0.25


class Joining(msgspec.Struct, tag=True):
    """First message: the ranks of the sender, sent before torch is imported. `error` is the reason
    if it cannot run.
    """

    protocol: int
    ranks: tuple[int, ...]
    world: int
    host: str
    error: str = ""


class Hello(msgspec.Struct, tag=True):
    """The sender can fork ranks. `identity` (versions and digests, by name) must be equal in all
    processes.
    """

    identity: dict[str, str]
    error: str = ""


class Written(msgspec.Struct, tag=True):
    """Part of the trace of a rank that has exited."""

    world: int
    rank: int
    offset: int
    data: bytes


class RankHeartbeat(msgspec.Struct, tag=True):
    """Heartbeat of an agent, with the state of its ranks: busy seconds, and which ranks are awake
    or stopped.
    """

    world: int
    busy_s: dict[int, float]
    awake: tuple[int, ...]
    stopped: tuple[int, ...] = ()


class DataPrepared(msgspec.Struct, tag=True):
    """The data set was read, or `error` is the reason why not."""

    description: bytes
    error: str = ""


class Prepare(msgspec.Struct, tag=True):
    """Request to read a data set."""

    name: str
    data_dir: str
    download: bool


class ReplacedDescriptor(msgspec.Struct, frozen=True):
    """Local replacement for a descriptor of the front end; see `shares.Shared`."""

    name: str
    kind: str
    key: str
    size: int


class RankToStart(msgspec.Struct, frozen=True):
    """One rank to start. When it has exited, the `regions` (offset, length) of its first trace are
    sent.
    """

    rank: int
    payload: bytes
    environment: dict[str, str]
    regions: tuple[tuple[int, int], ...]


class StartRanks(msgspec.Struct, tag=True):
    """Start a share of a world. `world` numbers worlds, so that late messages can be attributed."""

    world: int
    target: str
    ranks: tuple[RankToStart, ...]
    given: tuple[ReplacedDescriptor, ...]


class ToRanks(msgspec.Struct, tag=True):
    """Request to the ranks of a world: "signal" sends signal `number` to `rank`, "ask" makes all
    ranks report their stacks, "release" lets finished ranks exit, "close" ends all ranks and
    forgets the world.
    """

    world: int
    do: Literal["signal", "ask", "release", "close"]
    rank: int = -1
    number: int = 0


class Heartbeat(msgspec.Struct, tag=True):
    """Heartbeat of the front end."""


class Shutdown(msgspec.Struct, tag=True):
    """Result of the run: exit with this code."""

    exit_code: int
    summary: str


FromHost = Joining | Hello | RoutedEvent | Written | RankHeartbeat | DataPrepared
FromFront = Prepare | StartRanks | ToRanks | Heartbeat | Shutdown


class _SignedFrames(Frames):
    def __init__(self, kind: Any, key: bytes) -> None:
        super().__init__(kind)
        self._signer = secret.Signer(key)

    def decode(self, body: bytes) -> Any:
        return super().decode(self._signer.verify(body))


class Connection(Line):
    """One end of a connection between machines, whose messages are signed. Sends block for at most
    `patience_s`; threads may share it.
    """

    receive_bytes = 1 << 20
    most_bytes = MOST_BYTES

    def __init__(
        self, connection: socket.socket, kind: Any, keys: secret.Keys, *, patience_s: float
    ) -> None:
        super().__init__(connection, kind)
        self._frames = _SignedFrames(kind, keys.peer)
        self._sign = secret.Signer(keys.own).sign
        self._sending = threading.Lock()
        connection.settimeout(patience_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: msgspec.Struct, fds: Iterable[int] = ()) -> None:
        with self._sending:  # messages are signed in the order in which they are sent
            super().send(message, fds)

    def be_patient(self, patience_s: float) -> None:
        """Set the timeout of sends, and of receives if nothing has arrived."""
        self._connection.settimeout(patience_s)

    @property
    def own_address(self) -> str:
        """The address of this end; empty for a Unix socket."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        return str(self._connection.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The address of the other end; empty if it is on this machine."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        address = str(self._connection.getpeername()[0])
        return "" if address in ("127.0.0.1", "::1", self.own_address) else address
