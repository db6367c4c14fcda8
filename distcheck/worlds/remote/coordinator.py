"""Pool whose ranks are spread over processes that a launcher started, on one or several machines.

The process with rank 0 is the front end: it plans, judges and reports, and runs its own ranks.
Every other process is an agent (`agent.py`): it has its own helper, forks the ranks that the front
end requests, forwards their events, and sends their regions of the trace after they have exited. A
world under torchrun is therefore created, supervised and ended like any other.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec
import psutil

from distcheck.errors import CannotRunError, MembershipError, RankLostError
from distcheck.worlds import messages
from distcheck.worlds.call_log import LoggedCall
from distcheck.worlds.launchers import Launch
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.forking import LocalShare
from distcheck.worlds.local.helper_process import CleanHelper
from distcheck.worlds.pool import Pool
from distcheck.worlds.remote import bootstrap, protocol, secret
from distcheck.worlds.remote.handshake import Handshakes
from distcheck.worlds.shares import RankStart, Region, Share, Shared, descriptors_of
from distcheck.worlds.stalls import TimeBetweenLooks
from distcheck.worlds.surroundings import HASH_SEED, HASH_SEEDS, Surroundings

_ENDED = "its process exited"


@dataclass(eq=False)
class RemoteChild(Child):
    """A rank in another process, with its last reported state."""

    busy_seconds: float = 0.0
    known_at: float = 0.0
    is_awake: bool = False
    low_level_stacks: str = ""
    heard_stopped: bool = False
    heard_called: list[LoggedCall] = field(default_factory=list)  # sent when the rank has exited

    @property
    def is_stopped(self) -> bool:
        """The state of the rank as its own machine has reported it."""
        return self.heard_stopped and not self.gone

    @property
    def called(self) -> list[LoggedCall]:
        return self.heard_called

    def take(self, event: messages.AnyEvent) -> None:
        if isinstance(event, messages.Exited):
            self.low_level_stacks, self.heard_called = event.stacks, event.called
        super().take(event)


class Link:
    """The connection to one process, and that process's shares of worlds. `on_lost` is called when
    the connection ends.
    """

    def __init__(
        self, line: protocol.Connection, coming: protocol.Joining, on_lost: Callable[["Link"], None]
    ) -> None:
        self.line, self._on_lost = line, on_lost
        address = line.peer_address
        self.host = f"{coming.host} ({address})" if address else coming.host
        self.ranks = coming.ranks
        self.hello: protocol.Hello | None = None
        self.prepared: protocol.DataPrepared | None = None
        self.lost = ""
        self.silent_s = 0.0  # time without a message while this process was reading
        self._shares: dict[int, RemoteShare] = {}

    @property
    def name(self) -> str:
        """Name for messages, such as "rank 2 on HOST"."""
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks} on {self.host}"

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Does nothing if the peer is lost; marks it as lost if sending fails."""
        if self.lost:
            return
        try:
            self.line.send(message)
        except ConnectionError:
            self.lose(_ENDED)
        except OSError as error:
            self.lose(error.strerror or "the connection was lost")

    def lose(self, reason: str) -> None:
        """Mark the peer as lost, and every rank there."""
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
        except (EOFError, ConnectionError):  # a reset, if data sent by this process was unread
            self.lose(_ENDED)
            return
        except OSError as error:
            self.lose(error.strerror or str(error))
            return
        self.silent_s = 0.0
        for message in arrived:
            self.take(message)

    def take(self, message: protocol.FromHost) -> None:
        if isinstance(message, protocol.Hello):
            self.hello = message
        elif isinstance(message, protocol.DataPrepared):
            self.prepared = message
        elif not isinstance(message, protocol.Joining):
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
            protocol.RankToStart(rank, start.payload, dict(start.environment), regions[rank])
            for rank, start in starts.items()
        )
        given = tuple(
            protocol.ReplacedDescriptor(name, one.kind, one.key, one.size)
            for name, one in fds.items()
        )
        self.send(protocol.StartRanks(world, target, orders, given))
        if self.lost:
            share.lose()
        return share

    def forget(self, world: int) -> None:
        self._shares.pop(world, None)
        self.send(protocol.ToRanks(world, "close"))


class RemoteShare(Share):
    """Ranks at the other end of a link."""

    def __init__(
        self, link: Link, world: int, trace_fd: int, regions: dict[int, tuple[Region, ...]]
    ) -> None:
        self._link, self._world = link, world
        self._trace_fd, self._regions = trace_fd, regions
        self.children: dict[int, Child] = {rank: RemoteChild() for rank in regions}

    def signal(self, child: Child, number: int) -> None:
        rank = next(rank for rank, other in self.children.items() if other is child)
        self._link.send(protocol.ToRanks(self._world, "signal", rank, number))

    def ask(self) -> None:
        self._link.send(protocol.ToRanks(self._world, "ask"))

    def release(self) -> None:
        self._link.send(protocol.ToRanks(self._world, "release"))

    def close(self) -> None:
        self._link.forget(self._world)

    def lose(self) -> None:
        for child in self.children.values():
            if not child.gone:
                child.gone, child.lost = True, self._link.lost

    def take(self, message: protocol.FromHost) -> None:
        if isinstance(message, protocol.Joining | protocol.Hello | protocol.DataPrepared):
            return
        if isinstance(message, protocol.RankHeartbeat):
            ranks = set(message.busy_s)
        else:
            ranks = {message.key if isinstance(message, messages.RoutedEvent) else message.rank}
        if not ranks <= self.children.keys():
            self._link.lose(
                f"it names rank {max(ranks - self.children.keys())}, which it does not own"
            )
        elif isinstance(message, protocol.RankHeartbeat):
            for rank, busy_s in message.busy_s.items():
                child = self._child(rank)
                child.busy_seconds, child.is_awake = busy_s, rank in message.awake
                child.heard_stopped = rank in message.stopped
                child.known_at = time.monotonic()
        elif isinstance(message, protocol.Written):
            self._write(message)
        else:
            if isinstance(message.event, messages.Raised):
                message.event.at = time.monotonic() - message.age_s
            self.children[message.key].take(message.event)

    def _child(self, rank: int) -> RemoteChild:
        child = self.children[rank]
        assert isinstance(child, RemoteChild)
        return child

    def _write(self, message: protocol.Written) -> None:
        end = message.offset + len(message.data)
        for offset, length in self._regions[message.rank]:
            if offset <= message.offset and end <= offset + length:
                os.pwrite(self._trace_fd, message.data, message.offset)
                return
        self._link.lose(f"it wrote outside rank {message.rank}'s part of the trace")


LEAST_SILENCE_S = 5.0
_IMPORT_S = 300.0  # importing torch from a cold network disk
_FAREWELL_S = 0.5  # from a launcher's SIGTERM to the end of the process that caused it
_BYE_S = 2.0  # for agents to exit before the front end does


class Coordinator(Pool):
    """The front end's pool. `wait_ready` returns when all ranks are connected."""

    def __init__(self, launch: Launch, *, deadline_s: float, identity: Mapping[str, str]) -> None:
        super().__init__(helper_for_launch(launch))
        self._launch, self._deadline_s = launch, deadline_s
        self._identity = identity
        self._run = secret.RunSecret(secret.shared_secret(), "verify", launch.key_name)
        self._links: list[Link] = []
        self._worlds = 0
        self._gathered = False
        self._is_gathering = True  # until all have connected and run the same versions
        self._beats = TimeBetweenLooks(0.0)
        self._asked_to_end = False

    @property
    def forks_all(self) -> bool:
        """True if no other process has ranks."""
        return not self._links

    @property
    def address(self) -> str:
        """The address at which the other processes have connected to this one."""
        return next(filter(None, (link.line.own_address for link in self._links)), "127.0.0.1")

    def ranks_here(self, world: int) -> int:
        return min(world, self._launch.local_world)

    def describe(self) -> dict[str, Any]:
        """Return the launcher, and the place of each rank."""
        own = ", ".join(map(str, self._launch.ranks_here))
        hosts = [f"{own} on {socket.gethostname()}", *(link.name for link in self._links)]
        return {
            "launcher": self._launch.launcher,
            "hash_seeds": list(HASH_SEEDS),
            "hosts": [host.removeprefix("rank ").removeprefix("ranks ") for host in hosts],
        }

    def open_interpreters(self) -> None:
        """Do nothing: there is already a process for every rank, or for several of them."""

    def why_no_interpreters(self) -> str:
        """Return that each of the launcher's processes has its own interpreter."""
        return f"each process of {self._launch.launcher} has its own in both worlds"

    def wait_ready(self) -> str:
        """Wait until torch is imported and every other process is connected. Raises
        CannotRunError.
        """
        if self._gathered:
            return super().wait_ready()
        self._gathered = True  # the calls below call this again
        if self._launch.world == len(self._launch.ranks_here):
            version = super().wait_ready()
            if self._launch.meeting.startswith("store://"):  # maybe the rest of a larger run
                share_address(self, self._launch, value="alone", deadline_s=self._deadline_s)
            return version
        self.open()
        with self._listening() as server:
            self._accept_all(server)
        version = super().wait_ready()
        self._check_alike({**self._identity, "torch": version})
        self._is_gathering = False
        return version

    def start_ranks(
        self,
        target: str,
        starts: Sequence[RankStart],
        fds: Mapping[str, Shared],
        *,
        together: bool = False,
    ) -> list[Share]:
        """Return one share here and one for every other process; all ranks here if `together`."""
        if together:
            away = [link.name for link in self._links if link.line.peer_address]
            if away:
                raise CannotRunError(
                    f"--backend mpi runs on one machine, but {away[0]} is on another; start all "
                    "ranks on one machine, or pass --backend gloo"
                )
            return super().start_ranks(target, starts, fds)
        if len(starts) != self._launch.world:
            raise CannotRunError(
                f"a world of {len(starts)} ranks was requested, but {self._launch.launcher} "
                f"started {self._launch.world}"
            )
        self._worlds += 1
        ranks = self._launch.ranks_here
        own = {
            rank: start_with_settings(starts[rank], index, self._launch, self.address)
            for index, rank in enumerate(ranks)
        }
        shares: list[Share] = [LocalShare(self, target=target, starts=own, fds=descriptors_of(fds))]
        for link in self._links:
            theirs = {rank: starts[rank] for rank in link.ranks}
            shares.append(link.start(self._worlds, target, theirs, fds))
        return shares

    def share_data(self, name: str, data_dir: str, *, download: bool) -> dict[str, bytes]:
        """Make every other process read the data; return the results. Raises CannotRunError."""
        for link in self._links:
            link.prepared = None
            link.send(protocol.Prepare(name, data_dir, download))
        while any(link.prepared is None and not link.lost for link in self._links):
            self.pump(protocol.SIGN_EVERY_S)
        found = {}
        for link in self._links:
            if link.lost or link.prepared is None:
                raise RankLostError(link.lost)
            if link.prepared.error:
                raise CannotRunError(f"{link.name}: {link.prepared.error}")
            found[link.name] = link.prepared.description
        return found

    def pump(self, timeout_s: float) -> None:
        """Handle events as any pool does. Also send heartbeats, and check those of the other
        processes.
        """
        super().pump(min(timeout_s, protocol.SIGN_EVERY_S) if self._links else timeout_s)
        if self._asked_to_end:
            self._end_as_asked()
        now = time.monotonic()
        if now - self._beats.last < protocol.SIGN_EVERY_S:
            return
        seen_s = self._beats.since_last(now)
        for link in self._links:
            link.silent_s += seen_s
            # A process that is importing torch sends nothing.
            allowed_s = max(self._deadline_s, LEAST_SILENCE_S) if link.hello else _IMPORT_S
            if not link.lost and link.silent_s > allowed_s:
                link.lose(f"it sent no heartbeat for {allowed_s:g} s")
            link.send(protocol.Heartbeat())

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Record that the launcher ends its processes. `pump` then finds out why."""
        self._asked_to_end = True

    def _end_as_asked(self) -> None:
        """Wait for the lost process because of which the launcher ends all processes; the world
        then reports it. Raises KeyboardInterrupt if no process was lost.
        """
        self._asked_to_end = False
        deadline = time.monotonic() + _FAREWELL_S
        while not any(link.lost for link in self._links):
            if time.monotonic() > deadline:
                raise KeyboardInterrupt
            super().pump(0.05)

    def _on_lost(self, link: Link) -> None:
        """Stop watching a lost peer. Raises RankLostError if no world exists yet that can report
        the loss.
        """
        self.unwatch(link.line)
        if self._is_gathering and link in self._links:
            raise RankLostError(link.lost)

    def dismiss(self, exit_code: int, summary: str) -> None:
        """Make every other process exit with the exit code of the verdict, and wait briefly until
        they have exited.
        """
        self._is_gathering = False
        for link in self._links:
            link.send(protocol.Shutdown(exit_code, summary))
        deadline = time.monotonic() + _BYE_S
        while any(not link.lost for link in self._links) and time.monotonic() < deadline:
            super().pump(0.05)

    def let_go(self) -> None:
        for link in self._links:
            self.unwatch(link.line)
            link.line.close()
        self._links.clear()
        super().let_go()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        place = self._launch.meeting
        scheme, _, name = place.partition("://")
        with contextlib.ExitStack() as stack:
            if scheme == "unix":
                server = stack.enter_context(
                    bootstrap.listen_here(secret.private_name(name, self._run.secret))
                )
            elif scheme == "file":
                server = stack.enter_context(bootstrap.listen_on_own())
                here = bootstrap.place_of(server)
                stack.enter_context(bootstrap.publish_address_in_file(name, here))
            elif scheme == "store":
                server = stack.enter_context(
                    bootstrap.listen_on_way_to(*bootstrap.address_of(place))
                )
                super().wait_ready()
                here = bootstrap.place_of(server)
                share_address(self, self._launch, value=here, deadline_s=self._deadline_s)
            else:
                server = stack.enter_context(bootstrap.listen(*bootstrap.address_of(place)))
            yield server

    def _accept_all(self, server: socket.socket) -> None:
        """Accept connections until all ranks have places. Raises CannotRunError at the deadline."""
        patience_s = max(self._deadline_s, LEAST_SILENCE_S)
        deadline = time.monotonic() + patience_s
        translated = bootstrap.translated_to(server, self._launch.meeting)
        handshakes = Handshakes(server, self._run, translated=translated)
        try:
            self._wait_for_all(handshakes, deadline, patience_s)
        finally:
            handshakes.close()

    def _wait_for_all(self, handshakes: Handshakes, deadline: float, patience_s: float) -> None:
        while missing := self._missing():
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise CannotRunError(
                    f"{'ranks' if len(missing) > 1 else 'rank'} {ranks} of {self._launch.world} "
                    f"did not connect within {patience_s:g} s; were their processes started, "
                    "and can they reach this machine? Raise --deadline to wait longer"
                    + _about_refused(handshakes.refused)
                )
            self.pump(0)
            for line, words in handshakes.come(0.1):
                self._accept_agent(line, words)

    def _accept_agent(self, line: protocol.Connection, words: list[Any]) -> None:
        coming: protocol.Joining = words[0]
        line.be_patient(max(self._deadline_s, LEAST_SILENCE_S))
        link = Link(line, coming, self._on_lost)
        for word in words[1:]:
            link.take(word)
        problem = coming.error and f"{link.name} cannot take part: {coming.error}"
        if coming.protocol != protocol.PROTOCOL:
            problem = (
                f"{link.name} has a different version of distcheck; install the same "
                "version everywhere"
            )
        elif coming.world != self._launch.world:
            problem = (
                f"{link.name} was started for a world of {coming.world} ranks, but rank 0 for "
                f"{self._launch.world}"
            )
        elif not set(coming.ranks) <= set(self._missing()):
            problem = f"{link.name} connected twice; assign different ranks to every process"
        self._links.append(link)
        self.watch(line, link.on_readable)
        if problem:
            raise CannotRunError(problem)

    def _missing(self) -> list[int]:
        there = {*self._launch.ranks_here, *(rank for link in self._links for rank in link.ranks)}
        return [rank for rank in range(self._launch.world) if rank not in there]

    def _check_alike(self, own: Mapping[str, str]) -> None:
        """Wait until every process has sent its versions. Raises CannotRunError for the first one
        that differs.
        """
        deadline = time.monotonic() + _IMPORT_S
        while waiting := [x for x in self._links if x.hello is None and not x.lost]:
            self.pump(protocol.SIGN_EVERY_S)
            if time.monotonic() > deadline:
                raise CannotRunError(
                    f"{waiting[0].name} did not import torch within {_IMPORT_S:.0f} s"
                )
        for link in self._links:
            if link.hello is None:
                raise RankLostError(link.lost)
            if link.hello.error:
                raise CannotRunError(f"{link.name} cannot take part: {link.hello.error}")
            for name, ours in own.items():
                theirs = link.hello.identity.get(name, "none")
                if theirs != ours:
                    raise CannotRunError(
                        f"{name} differs: {theirs} for {link.name}, {ours} for rank 0; "
                        "make it the same on every machine"
                    )


def _about_refused(connections: int) -> str:
    if not connections:
        return ""
    return (
        f"; {connections} connections were rejected because they did not have rank 0's secret, or "
        f"were not made to rank 0's address: {secret.ADVICE}"
    )


def helper_for_launch(launch: Launch) -> CleanHelper:
    """Return a helper for a launched process. Its hash seed depends on the rank, as in a rerun."""
    number = Surroundings(("interpreters",)).interpreter_of(launch.rank)
    return CleanHelper(hash_seed=HASH_SEED if number is None else HASH_SEEDS[number])


def start_with_settings(
    start: RankStart, index: int, launch: Launch, own_address: str
) -> RankStart:
    """Return a rank's start with the settings of the process that runs it: its local rank, and the
    network interface that leads to the others. The launcher defines the machine index.
    """
    environment = {
        **{n: value for n, value in start.environment.items() if not n.startswith("GROUP_")},
        "LOCAL_RANK": str(launch.local_rank + index),
        "LOCAL_WORLD_SIZE": str(launch.local_world),
    }
    interface = interface_of(own_address)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if interface and name not in os.environ:
            environment[name] = interface
    return RankStart(payload=start.payload, environment=environment, fds=start.fds)


def interface_of(address: str) -> str:
    """Return the name of the network interface with an address here; empty if none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return str(name)
    return ""


def share_address(pool: Pool, launch: Launch, *, value: str, deadline_s: float) -> str:
    """Publish rank 0's address in the launcher's store, or wait for it if `value` is empty; return
    it. Raises MembershipError if the size of the run has changed.
    """
    from distcheck.worlds.launch import run_job

    host, port = bootstrap.address_of(launch.meeting)
    request = bootstrap.StoreRequest(
        host=host,
        port=port,
        key=f"distcheck/{launch.run}/{launch.restarts}/{launch.world}/front",
        value=value,
        size_key=f"distcheck/{launch.run}/size",
        size=launch.world,
        deadline_s=deadline_s,
    )
    word = run_job(pool, bootstrap.THROUGH_STORE, request)
    if word.first_size != launch.world:
        raise MembershipError(
            f"{launch.launcher} started this run with {word.first_size} ranks and restarted it "
            f"with {launch.world}: the membership changed, so nothing is verified"
        )
    return word.value
