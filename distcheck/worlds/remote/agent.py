"""Agent process: forks ranks for a front end in another process, supervises them, and forwards
their events and traces.

It makes no decisions. It exits when the front end sends the result (`Shutdown`), when no heartbeat
arrives within the deadline, or when its connection breaks; its ranks end with it.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from distcheck.errors import CannotRunError, DistcheckError, RankLostError
from distcheck.machine.sealed_memory import open_memory, seal_content, sealed_memory
from distcheck.worlds import messages
from distcheck.worlds.jobs import Job
from distcheck.worlds.launch import job_result, start_job
from distcheck.worlds.launchers import Launch
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.forking import LocalShare
from distcheck.worlds.pool import Pool
from distcheck.worlds.remote import bootstrap, protocol, secret
from distcheck.worlds.remote.coordinator import LEAST_SILENCE_S, share_address, start_with_settings
from distcheck.worlds.shares import RankStart, Region
from distcheck.worlds.stalls import TimeBetweenLooks
from distcheck.worlds.world import World

_CHUNK_BYTES = 1 << 20
_ERROR_PATIENCE_S = 15.0
_ASK_AGAIN_S = 2.0
_FAREWELL_S = 10.0  # from a launcher's SIGTERM to the front end's message; torchrun waits 30 s
_FRONT_ENDED = "rank 0 exited without a verdict"
_READ_DEADLINE_S = 600.0  # idle seconds; downloads take time


@dataclass(eq=False)
class HostedChild(Child):
    """A rank in this process's care. All of its events are forwarded to the front end."""

    host: "Agent | None" = None
    world: int = 0
    rank: int = 0
    end_is_known: bool = False  # by the front end

    def take(self, event: messages.AnyEvent) -> None:
        """Record an event and forward it; the agent sends the exit after all other data."""
        super().take(event)
        if isinstance(event, messages.ChildEvent) and not isinstance(event, messages.Exited):
            self.pass_on(event)

    def take_output(self, data: bytes) -> None:
        self.pass_on(messages.Printed(data))

    def pass_on(self, event: messages.ChildEvent) -> None:
        assert self.host is not None
        age_s = time.monotonic() - event.at if isinstance(event, messages.Raised) else 0.0
        self.host.send(messages.RoutedEvent(self.rank, event, self.world, age_s))


@dataclass(eq=False)
class HostedShare:
    """The ranks of one world in this process, and the local replacements for the front end's
    descriptors.
    """

    share: LocalShare
    regions: dict[int, tuple[Region, ...]]
    trace_fd: int


class HostedJobs(Protocol):
    """The jobs that the front end may run in this process."""

    def check(self, target: str, payload: bytes) -> None:
        """Raise CannotRunError for a job that a rank of this process must not run."""

    def prepare(self, name: str, data_dir: str, *, download: bool) -> tuple[Job[Any, bytes], Any]:
        """Return the job that reads a data set, and its request."""


class Agent:
    """One of the launched processes, except the front end."""

    def __init__(self, pool: Pool, launch: Launch, *, deadline_s: float) -> None:
        self._pool, self._launch = pool, launch
        self._silence_s = max(deadline_s, LEAST_SILENCE_S)
        self._deadline_s = deadline_s
        self._line: protocol.Connection | None = None
        self._jobs: HostedJobs | None = None
        self._shares: dict[int, HostedShare] = {}
        self._traces: dict[str, int] = {}
        self._data_fd = -1
        self._over: protocol.Shutdown | None = None
        self._preparing: World | None = None
        self._silent_s, self._last_signs = 0.0, time.monotonic()
        self._asked_to_end_at: float | None = None

    def serve(self, identity: Mapping[str, str], jobs: HostedJobs) -> protocol.Shutdown:
        """Run ranks until the front end ends the run; return its result. Only jobs that `jobs`
        permits are run. Raises CannotRunError, or RankLostError.
        """
        self._jobs = jobs
        self._pool.open()
        self._meet(error="", patience_s=self._silence_s)
        try:
            version, error = self._pool.wait_ready(), ""
        except CannotRunError as failure:
            version, error = "none", str(failure)
        self.send(protocol.Hello({**identity, "torch": version}, error))
        looks = TimeBetweenLooks(time.monotonic())
        while self._over is None:
            self._silent_s += looks.since_last(time.monotonic())
            self._pool.pump(0.1)
            self._pass_on_ends()
            self._tick_preparing()
            asked_at = self._asked_to_end_at
            if asked_at is not None and time.monotonic() - asked_at > _FAREWELL_S:
                raise KeyboardInterrupt
            if self._silent_s > self._silence_s:
                raise RankLostError(f"rank 0 sent no heartbeat for {self._silence_s:g} s")
        return self._over

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Record that the launcher ends its processes. The front end receives the same signal and
        sends the exit code; exiting earlier would look like the loss of this process. Before a
        front end is connected, exit at once.
        """
        if self._line is None:
            raise KeyboardInterrupt
        self._asked_to_end_at = self._asked_to_end_at or time.monotonic()

    def decline(self, error: DistcheckError) -> None:
        """Report to the front end why this process cannot take part. Raises CannotRunError if the
        front end is unreachable, for example because it has the same error.
        """
        self._pool.open()
        self._meet(error=str(error), patience_s=_ERROR_PATIENCE_S)

    def close(self) -> None:
        for world in list(self._shares):
            self._close_ranks(world)
        for fd in [*self._traces.values(), self._data_fd]:
            if fd >= 0:
                os.close(fd)
        self._traces.clear()
        self._data_fd = -1
        if self._line is not None:
            self._line.close()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the front end, unless it has ended the run. Raises RankLostError."""
        assert self._line is not None
        if self._over is not None:  # this process exits; further messages change nothing
            return
        try:
            self._line.send(message)
        except ConnectionError:
            if not self._heard_verdict():
                raise RankLostError(_FRONT_ENDED) from None
        except OSError as error:
            raise RankLostError(
                f"rank 0 can no longer be reached: {error.strerror or error}"
            ) from None

    def _heard_verdict(self) -> bool:
        """Return True if the front end had sent the result before it closed the connection."""
        assert self._line is not None
        with contextlib.suppress(EOFError, OSError, msgspec.MsgspecError):
            while self._over is None:
                said = [x for x in self._line.receive() if isinstance(x, protocol.Shutdown)]
                self._over = said[0] if said else None
        return self._over is not None

    def _meet(self, *, error: str, patience_s: float) -> None:
        run = secret.RunSecret(secret.shared_secret(), "verify", self._launch.key_name)
        find = self._make_finder(patience_s, run.secret)
        self._line = bootstrap.connect(find, run, deadline_s=patience_s)
        self._line.be_patient(patience_s)
        self.send(
            protocol.Joining(
                protocol.PROTOCOL,
                self._launch.ranks_here,
                self._launch.world,
                socket.gethostname(),
                error,
            )
        )
        self._pool.watch(self._line, self._on_readable)

    def _make_finder(self, patience_s: float, own_secret: bytes) -> bootstrap.Finder:
        scheme, _, name = self._launch.meeting.partition("://")
        if scheme == "unix":
            private = secret.private_name(name, own_secret)
            return lambda: private
        if scheme == "file":
            return lambda: bootstrap.address_in(Path(name))
        if scheme == "store":
            self._pool.wait_ready()
            return StoreFinder(self._pool, self._launch, patience_s)
        place = bootstrap.address_of(self._launch.meeting)
        return lambda: place

    def _on_readable(self) -> None:
        assert self._line is not None
        try:
            arrived = self._line.receive()
        except (EOFError, OSError):
            raise RankLostError(_FRONT_ENDED) from None
        except msgspec.MsgspecError:
            raise CannotRunError(
                f"the peer at {self._launch.meeting} is not distcheck, or a different version of it"
            ) from None
        self._silent_s = 0.0
        for message in arrived:
            self._take(message)

    def _take(self, message: protocol.FromFront) -> None:
        if isinstance(message, protocol.Shutdown):
            self._over = message
        elif isinstance(message, protocol.Prepare):
            self._prepare(message)
        elif isinstance(message, protocol.StartRanks):
            self._start(message)
        elif isinstance(message, protocol.ToRanks) and message.world in self._shares:
            share = self._shares[message.world].share
            if message.do == "signal":
                share.signal(share.children[message.rank], message.number)
            elif message.do == "ask":
                share.ask()
            elif message.do == "release":
                share.release()
            else:
                self._close_ranks(message.world)

    def _prepare(self, message: protocol.Prepare) -> None:
        if self._data_fd >= 0:
            os.close(self._data_fd)
        self._data_fd = open_memory("distcheck-data")
        assert self._jobs is not None
        job, request = self._jobs.prepare(message.name, message.data_dir, download=message.download)
        fds = dict.fromkeys(job.descriptors, self._data_fd)
        self._preparing = start_job(self._pool, job, request, fds, deadline_s=_READ_DEADLINE_S)

    def _tick_preparing(self) -> None:
        """Advance the job that reads a data set, and send its result; heartbeats continue."""
        world = self._preparing
        if world is None:
            return
        world.tick()
        if not world.over:
            return
        self._preparing = None
        try:
            result = job_result(world)
            seal_content(self._data_fd)
            self.send(protocol.DataPrepared(result))
        except DistcheckError as error:
            self.send(protocol.DataPrepared(b"", str(error)))
        finally:
            world.close()

    def _start(self, message: protocol.StartRanks) -> None:
        assert self._jobs is not None
        for order in message.ranks:
            self._jobs.check(message.target, order.payload)
        with self._given(message.given) as fds:
            starts = {
                order.rank: start_with_settings(
                    RankStart(payload=order.payload, environment=order.environment),
                    index,
                    self._launch,
                    self._line.own_address if self._line else "",
                )
                for index, order in enumerate(message.ranks)
            }
            share = LocalShare(
                self._pool,
                target=message.target,
                starts=starts,
                fds=fds,
                new_child=lambda rank: HostedChild(host=self, world=message.world, rank=rank),
            )
        trace = next((given.key for given in message.given if given.kind == "trace"), "")
        self._shares[message.world] = HostedShare(
            share,
            {order.rank: order.regions for order in message.ranks},
            self._traces.get(trace, -1),
        )

    @contextlib.contextmanager
    def _given(self, given: tuple[protocol.ReplacedDescriptor, ...]) -> Iterator[dict[str, int]]:
        """Yield local replacements for the front end's descriptors. Traces of earlier worlds are
        freed, unless this world is a rerun that is compared with the last one.
        """
        wanted = {one.key for one in given if one.kind == "trace"}
        for key in set(self._traces) - wanted:
            os.close(self._traces.pop(key))
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            fds = {}
            for one in given:
                if one.kind == "trace" and one.key not in self._traces:
                    self._traces[one.key] = sealed_memory("distcheck-trace", one.size)
                known = {"trace": self._traces.get(one.key, -1), "data": self._data_fd}
                fds[one.name] = known.get(one.kind, nothing)
            yield fds
        finally:
            os.close(nothing)

    def _pass_on_ends(self) -> None:
        for world, hosted in list(self._shares.items()):
            for rank, child in hosted.share.children.items():
                assert isinstance(child, HostedChild)
                if child.gone and not child.end_is_known and not child.spawn_error:
                    child.end_is_known = True
                    self._send_trace(world, rank, hosted)
                    stacks, called = child.low_level_stacks, child.called
                    end = messages.Exited(child.exit_code, child.exit_signal, stacks, called)
                    child.pass_on(end)
        now = time.monotonic()
        if now - self._last_signs >= protocol.SIGN_EVERY_S:
            self._last_signs = now
            self._send_signs()

    def _send_signs(self) -> None:
        if not self._shares:
            self.send(protocol.RankHeartbeat(0, {}, ()))
        for world, hosted in self._shares.items():
            there = {r: c for r, c in hosted.share.children.items() if not c.gone}
            busy_s = {rank: child.busy_seconds for rank, child in there.items()}
            awake = tuple(rank for rank, child in there.items() if child.is_awake)
            stopped = tuple(rank for rank, child in there.items() if child.is_stopped)
            self.send(protocol.RankHeartbeat(world, busy_s, awake, stopped))

    def _send_trace(self, world: int, rank: int, hosted: HostedShare) -> None:
        for begin, end in written_parts(hosted.trace_fd, hosted.regions[rank]):
            for offset in range(begin, end, _CHUNK_BYTES):
                data = os.pread(hosted.trace_fd, min(_CHUNK_BYTES, end - offset), offset)
                self.send(protocol.Written(world, rank, offset, data))

    def _close_ranks(self, world: int) -> None:
        hosted = self._shares.pop(world, None)
        if hosted is not None:
            hosted.share.close()


class StoreFinder:
    """Reads rank 0's address from the launcher's store, and again after a while, because the stored
    address may be that of an earlier start of the run.
    """

    def __init__(self, pool: Pool, launch: Launch, patience_s: float) -> None:
        self._pool, self._launch, self._patience_s = pool, launch, patience_s
        self._found: tuple[str, int] | None = None
        self._asked_at = 0.0

    def __call__(self) -> tuple[str, int] | None:
        """Return the address last read from the store."""
        now = time.monotonic()
        if self._found is None or now - self._asked_at > _ASK_AGAIN_S:
            place = share_address(self._pool, self._launch, value="", deadline_s=self._patience_s)
            self._found, self._asked_at = bootstrap.address_of(f"tcp://{place}"), now
        return self._found


def written_parts(fd: int, regions: tuple[Region, ...]) -> Iterator[Region]:
    """Yield the written parts (begin, end) of a sparse file within `regions` (offset, length)."""
    for offset, length in regions:
        at, end = offset, offset + length
        while at < end:
            try:
                begin = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # only a hole up to the end of the file
                break
            if begin >= end:
                break
            at = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
            yield begin, at
