"""The front's side of a process elsewhere: a connection, and the ranks that live there."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from distcheck.worlds import messages
from distcheck.worlds.call_log import Logged
from distcheck.worlds.local.children import Child
from distcheck.worlds.remote import wire
from distcheck.worlds.shares import RankStart, Region, Share, Shared

_ENDED = "its process has ended"


@dataclass(eq=False)
class RemoteChild(Child):
    """A rank elsewhere: what was last heard of it."""

    busy_seconds: float = 0.0
    known_at: float = 0.0
    is_awake: bool = False
    low_level_stacks: str = ""
    heard_stopped: bool = False
    heard_called: list[Logged] = field(default_factory=list)  # is sent when it is gone

    @property
    def is_stopped(self) -> bool:
        """As its own machine says."""
        return self.heard_stopped and not self.gone

    @property
    def called(self) -> list[Logged]:
        return self.heard_called

    def take(self, event: messages.AnyEvent) -> None:
        if isinstance(event, messages.Exited):
            self.low_level_stacks, self.heard_called = event.stacks, event.called
        super().take(event)


class Link:
    """The connection to one process, and the shares of worlds that it runs. `on_lost` is called
    when it breaks.
    """

    def __init__(
        self, line: wire.Wire, coming: wire.Coming, on_lost: Callable[["Link"], None]
    ) -> None:
        self.line, self._on_lost = line, on_lost
        address = line.peer_address
        self.host = f"{coming.host} ({address})" if address else coming.host
        self.ranks = coming.ranks
        self.hello: wire.Hello | None = None
        self.prepared: wire.DataPrepared | None = None
        self.lost = ""
        self.silent_s = 0.0  # for which it was listened to
        self._shares: dict[int, RemoteShare] = {}

    @property
    def name(self) -> str:
        """For a person: "rank 2 on HOST"."""
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks} on {self.host}"

    def send(self, message: msgspec.Struct) -> None:
        """Sends, unless the other end is lost, which this may be how one learns."""
        if self.lost:
            return
        try:
            self.line.send(message)
        except ConnectionError:
            self.lose(_ENDED)
        except OSError as error:
            self.lose(error.strerror or "the connection broke")

    def lose(self, reason: str) -> None:
        """Holds the other end for gone, and every rank that was there."""
        if self.lost:
            return
        self.lost = f"{self.name} can no longer be reached: {reason}"
        for share in self._shares.values():
            share.lose()
        self._on_lost(self)

    def on_readable(self) -> None:
        try:
            arrived = self.line.receive()
        except msgspec.MsgspecError as error:
            self.lose(f"its message is malformed ({error})")
            return
        except (EOFError, ConnectionError):  # a reset, where something of ours was still unread
            self.lose(_ENDED)
            return
        except OSError as error:
            self.lose(error.strerror or str(error))
            return
        self.silent_s = 0.0
        for message in arrived:
            self.take(message)

    def take(self, message: wire.FromHost) -> None:
        """Notes what the other end says."""
        if isinstance(message, wire.Hello):
            self.hello = message
        elif isinstance(message, wire.DataPrepared):
            self.prepared = message
        elif not isinstance(message, wire.Coming):
            share = self._shares.get(message.world)
            if share is not None:
                share.take(message)

    def start(
        self,
        world: int,
        target: str,
        starts: dict[int, RankStart],
        fds: Mapping[str, Shared],
    ) -> "RemoteShare":
        trace = next((given for given in fds.values() if given.kind == "trace"), None)
        regions = {rank: tuple(trace.regions(rank)) if trace else () for rank in starts}
        share = RemoteShare(self, world, -1 if trace is None else trace.fd, regions)
        self._shares[world] = share
        orders = tuple(
            wire.RankToStart(rank, start.payload, dict(start.environment), regions[rank])
            for rank, start in starts.items()
        )
        given = tuple(
            wire.GivenThere(name, one.kind, one.key, one.size) for name, one in fds.items()
        )
        self.send(wire.StartRanks(world, target, orders, given))
        if self.lost:
            share.lose()
        return share

    def forget(self, world: int) -> None:
        """Makes the other end drop a share."""
        self._shares.pop(world, None)
        self.send(wire.ToRanks(world, "close"))


class RemoteShare(Share):
    """Ranks at the other end of a link."""

    def __init__(
        self, link: Link, world: int, trace_fd: int, regions: dict[int, tuple[Region, ...]]
    ) -> None:
        self._link, self._world = link, world
        self._trace_fd, self._regions = trace_fd, regions
        self.children: dict[int, Child] = {rank: RemoteChild() for rank in regions}

    def signal(self, child: Child, number: int) -> None:
        """Sends a signal to a rank, if it is still there."""
        rank = next(rank for rank, other in self.children.items() if other is child)
        self._link.send(wire.ToRanks(self._world, "signal", rank, number))

    def ask(self) -> None:
        """Makes every rank tell what it is doing."""
        self._link.send(wire.ToRanks(self._world, "ask"))

    def release(self) -> None:
        """Lets ranks that are done leave."""
        self._link.send(wire.ToRanks(self._world, "release"))

    def close(self) -> None:
        """Makes the other end forget them."""
        self._link.forget(self._world)

    def lose(self) -> None:
        """Every rank that was still there is gone, and how is not known."""
        for child in self.children.values():
            if not child.gone:
                child.gone, child.lost = True, self._link.lost

    def take(self, message: wire.FromHost) -> None:
        """Notes what a rank there did."""
        if isinstance(message, wire.Coming | wire.Hello | wire.DataPrepared):
            return
        if isinstance(message, wire.Signs):
            ranks = set(message.busy_s)
        else:
            ranks = {message.key if isinstance(message, messages.Of) else message.rank}
        if not ranks <= self.children.keys():
            self._link.lose(f"it names rank {max(ranks - self.children.keys())}, not its own")
        elif isinstance(message, wire.Signs):
            for rank, busy_s in message.busy_s.items():
                child = self._child(rank)
                child.busy_seconds, child.is_awake = busy_s, rank in message.awake
                child.heard_stopped = rank in message.stopped
                child.known_at = time.monotonic()
        elif isinstance(message, wire.Written):
            self._write(message)
        else:
            if isinstance(message.event, messages.Raised):
                message.event.at = time.monotonic() - message.age_s
            self.children[message.key].take(message.event)

    def _child(self, rank: int) -> RemoteChild:
        child = self.children[rank]
        assert isinstance(child, RemoteChild)
        return child

    def _write(self, message: wire.Written) -> None:
        end = message.offset + len(message.data)
        for offset, length in self._regions[message.rank]:
            if offset <= message.offset and end <= offset + length:
                os.pwrite(self._trace_fd, message.data, message.offset)
                return
        self._link.lose(f"it wrote outside of rank {message.rank}'s part of the trace")
