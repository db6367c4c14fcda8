"""Front-end handle of a helper: starts children, handles their events and ends them. Also defines
the local ranks of a world as a `Share`.

A forker serves one front-end process. Its users decide how many children run at a time, and call
`pump` until the children are done.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import msgspec

from distcheck.errors import CannotRunError, HelperError
from distcheck.worlds import interrupts, linux, messages
from distcheck.worlds.framing import Frames, Line
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.helper_process import (
    NO_TORCH_IN_TIME,
    START_DEADLINE_S,
    HelperProcess,
    child_environment,
    folder_and_path,
    shuffled_variables,
)
from distcheck.worlds.shares import RankStart, Readable, Share
from distcheck.worlds.stalls import TimeBetweenLooks

_PATIENCE_S = 30.0  # for a helper that still has to end ranks and their descendants
_STOPPED_S = 30.0  # Heuristic: a helper may be stopped that long, as for a rank
_LOOK_EVERY_S = 0.2


class Forker:
    """A helper process and its children. Closing the forker ends all of them. Several forkers can
    share a selector, and the set `imports` of modules that children needed.
    """

    def __init__(
        self,
        helper: HelperProcess,
        *,
        selector: selectors.BaseSelector | None = None,
        imports: dict[str, None] | None = None,
    ) -> None:
        self._helper = helper
        self._owner = os.getpid()
        self._opened = self._closed = False
        self._children: dict[int, Child] = {}
        self._next_key = 0
        self._imports = {} if imports is None else imports
        self._shares_selector = selector is not None
        self._selector = selector or selectors.DefaultSelector()
        self._connection: socket.socket | None = None
        self._line: Line | None = None
        self._ready: messages.Ready | None = None
        self._looks, self._stopped_s = TimeBetweenLooks(time.monotonic()), 0.0

    @property
    def usable(self) -> bool:
        """True if this process created the forker (not the process that it was forked from) and the
        helper runs.
        """
        if os.getpid() != self._owner:
            return False
        return not self._closed and (not self._opened or self._helper.running)

    def open(self) -> None:
        """Start the helper without waiting until it is ready."""
        if self._opened:
            return
        if not sys.platform.startswith("linux"):
            raise CannotRunError(
                f"distcheck forks its ranks with Linux calls and cannot run on {sys.platform}; "
                "use a Linux machine, container or WSL"
            )
        ours, theirs = socket.socketpair()
        self._helper.start(theirs, ours=ours, imports=list(self._imports))
        self._opened = True
        theirs.close()
        ours.setblocking(False)
        self._connection, self._line = ours, Line(ours, messages.Notice)
        self._selector.register(ours, selectors.EVENT_READ, self._on_notices)

    def will_need(self, modules: Iterable[str]) -> None:
        """Make the helper import modules, or torch's compiler, once for all children."""
        self._imports.update(dict.fromkeys(modules))

    def wait_ready(self) -> str:
        """Wait until children can be started; return torch's version.

        Raises CannotRunError if torch cannot be imported.
        """
        self.open()
        deadline = time.monotonic() + START_DEADLINE_S
        while self._ready is None:
            self.pump(0.5)
            if time.monotonic() > deadline:
                raise CannotRunError(NO_TORCH_IN_TIME)
        if self._ready.error:
            raise CannotRunError(
                f"torch cannot be imported by {sys.executable}: {self._ready.error}; run "
                "distcheck doctor for details"
            )
        return self._ready.torch_version

    @property
    def importing(self) -> bool:
        """True if the helper was started and is not ready."""
        return self._opened and self._ready is None

    @property
    def start_error(self) -> str:
        """Reason why the helper failed to start; empty if it is ready or still starting."""
        return "" if self._ready is None else self._ready.error

    def place_of(self, interpreter: int | None) -> "Forker":
        """Return the forker of a further interpreter; this forker for None or if there are no
        others.
        """
        return self

    def watch(self, source: Readable | int, on_readable: Callable[[], None]) -> None:
        """Make `pump` call `on_readable` whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def unwatch(self, source: Readable | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def start(
        self,
        target: str,
        start: RankStart,
        *,
        fds: Descriptors,
        release_fd: int,
        dump_fd: int,
        child: Child | None = None,
    ) -> Child:
        """Fork a child that calls `target` ("module:function") with the payload of `start`, the
        descriptors of `start`, and `fds`.

        The caller keeps its own copies of the descriptors. After its job, the child lingers until
        `release_fd` is readable; it sends its stacks when `dump_fd` is readable. `child` is the
        object that receives the child's state; by default a new one.
        """
        fds = {**fds, **start.fds}
        environment = {**child_environment(), **self._helper.variables(), **start.environment}
        self.wait_ready()
        folder, path = folder_and_path(self._helper)
        child = child or Child()
        child.key = self._next_key
        self._next_key += 1
        self._children[child.key] = child
        events, output = child.open_pipes()
        frames = Frames(messages.Event)
        self.watch(child._events_fd, lambda: self._on_events(child, frames))
        self.watch(child._output_fd, lambda: self._on_output(child))
        spawn = messages.Spawn(
            key=child.key,
            target=target,
            payload=start.payload,
            cwd=folder,
            path=path,
            env=shuffled_variables(environment, start.order_seed),
            given=list(fds),
            fd_names=list(start.named_fds),
            imports=list(self._imports),
        )
        own_fds = [events, output, child._stacks_fd, release_fd, dump_fd]
        try:
            self._send(spawn, [*own_fds, *fds.values(), *start.named_fds.values()])
        except (BrokenPipeError, ConnectionError):
            self._helper_died()
        finally:
            os.close(events)
            os.close(output)
        return child

    def signal(self, child: Child, number: int) -> None:
        if child.gone or self._connection is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # it died with the helper
            self._send(messages.Signal(child.key, number))

    def pump(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for events and handle them. Raises HelperError."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self.look_at_helper()

    def look_at_helper(self) -> None:
        """Raise HelperError if the helper is stopped, because it would never answer."""
        now = time.monotonic()
        if self._closed or now - self._looks.last < _LOOK_EVERY_S:
            return
        elapsed = self._looks.since_last(now)
        pid = self._helper.pid
        self._stopped_s = self._stopped_s + elapsed if pid and linux.is_stopped(pid) else 0.0
        if self._stopped_s >= _STOPPED_S:
            self._give_up(f"it was stopped (process {pid}, state T, SIGSTOP)")

    def forget(self, child: Child) -> None:
        """Close the descriptors of a child that has exited. Called once per child."""
        for name in ("_events_fd", "_output_fd", "_stacks_fd"):
            self._close(child, name)
        self._children.pop(child.key, None)

    def close(self) -> None:
        """End the helper and all children. Ctrl-C is delivered only afterwards, so that a message
        that nothing is left running is true.
        """
        self.let_go()
        if self._opened and os.getpid() == self._owner:
            with interrupts.defer_signals():
                self._end()

    def let_go(self) -> None:
        """Ask the helper to end without waiting for it. Call `close` later."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._connection is not None:
            self.unwatch(self._connection)
            # Closing is not enough: a helper that was forked later has a copy of this end.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None
        for child in list(self._children.values()):
            self.forget(child)
        if not self._shares_selector:
            self._selector.close()

    def _end(self) -> None:
        """Wait until the helper, which was asked to end, has exited. Kill it when the patience runs
        out, or at once if it is stopped and cannot end by itself.
        """
        stopped = self._helper.pid and linux.is_stopped(self._helper.pid)
        self._helper.end(0.0 if stopped or self._ready is None else _PATIENCE_S)

    def _send(self, request: messages.Request, fds: Iterable[int] = ()) -> None:
        """Send a request. Raises HelperError if the helper does not read it, OSError if the helper
        has exited.
        """
        assert self._connection is not None
        assert self._line is not None
        self._connection.settimeout(_PATIENCE_S)
        try:
            self._line.send(request, fds)
        except TimeoutError:
            self._give_up(f"it received no message for {_PATIENCE_S:g} s")
        finally:
            self._connection.setblocking(False)

    def _give_up(self, how: str) -> NoReturn:
        """Kill the helper by SIGKILL, which also ends a stopped process. Raises HelperError."""
        self._helper.end(0.0)
        raise HelperError(
            f"the process that forks the ranks does not respond: {how}; run the command again"
        )

    def _helper_died(self) -> None:
        last = self._helper.last_words() or "no error message"
        raise HelperError(
            f"the process that forks the ranks ended unexpectedly: {last}; the usual reason is "
            "insufficient memory"
        )

    def _on_notices(self) -> None:
        assert self._line is not None
        try:
            notices = self._line.receive()
        except (EOFError, ConnectionError):
            self._helper_died()
            return
        for notice in notices:
            if isinstance(notice, messages.Ready):
                self._ready = notice
            elif notice.key in self._children:  # the child was not forgotten
                self._children[notice.key].take(notice.event)

    def _on_events(self, child: Child, frames: Frames) -> None:
        for data in self._read(child, "_events_fd"):
            try:
                events = frames.feed(data)
            except msgspec.DecodeError:
                self._close(child, "_events_fd")
                if child.raised is None:
                    child.take(messages.corrupted_pipe_event())
                self.signal(child, signal.SIGKILL)
                return
            for event in events:
                child.take(event)
                if isinstance(event, messages.Done):
                    self.will_need(event.imported)

    def _on_output(self, child: Child) -> None:
        for data in self._read(child, "_output_fd"):
            child.take_output(data)

    def _read(self, child: Child, name: str) -> list[bytes]:
        """Return everything that one of a child's pipes contains now. Close the pipe if the child
        has closed its end.
        """
        parts: list[bytes] = []
        while True:
            try:
                data = os.read(getattr(child, name), 65536)
            except BlockingIOError:
                return parts
            except OSError:
                data = b""
            if not data:
                self._close(child, name)
                return parts
            parts.append(data)

    def _close(self, child: Child, name: str) -> None:
        """Close one of a child's descriptors, once. Afterwards its number may belong to another
        file.
        """
        fd = getattr(child, name)
        if fd >= 0:
            self.unwatch(fd)
            os.close(fd)
            setattr(child, name, -1)


class LocalShare(Share):
    """Ranks of a world that this process's forker, or its further interpreters, have forked."""

    def __init__(
        self,
        forker: Forker,
        *,
        target: str,
        starts: Mapping[int, RankStart],
        fds: Descriptors,
        new_child: Callable[[int], Child] = lambda _: Child(),
    ) -> None:
        self._places = {rank: forker.place_of(one.interpreter) for rank, one in starts.items()}
        self.children: dict[int, Child] = {}
        forker.wait_ready()  # before there are pipes: a helper forked from here would keep them
        release_fd, self._release = os.pipe()
        dump_fd, self._dump = os.pipe()
        try:
            for rank, start in starts.items():
                self.children[rank] = self._places[rank].start(
                    target,
                    start,
                    fds=fds,
                    release_fd=release_fd,
                    dump_fd=dump_fd,
                    child=new_child(rank),
                )
        except BaseException:
            os.close(self._release)
            os.close(self._dump)
            raise
        finally:
            os.close(release_fd)
            os.close(dump_fd)

    def signal(self, child: Child, number: int) -> None:
        for rank, one in self.children.items():
            if one is child:
                self._places[rank].signal(child, number)

    def ask(self) -> None:
        self._close_pipe("_dump")

    def release(self) -> None:
        self._close_pipe("_release")

    def close(self) -> None:
        for rank, child in self.children.items():
            self._places[rank].forget(child)
        for name in ("_release", "_dump"):
            self._close_pipe(name)

    def _close_pipe(self, name: str) -> None:
        """Notify every child that reads the pipe, by one byte each. Closing the pipe is not enough,
        because a helper that was forked later may hold a copy of this end.
        """
        fd = getattr(self, name)
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.write(fd, bytes(len(self.children)))
            os.close(fd)
            setattr(self, name, -1)
