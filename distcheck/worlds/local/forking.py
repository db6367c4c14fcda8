"""The front's side of a helper: starts children, moves their events, ends them; and the ranks of a
world that live here, as a share of that world.

One forker serves one front process. Its users decide how many children there are at a time, and
call `pump` until they are done.
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
    in_order,
)
from distcheck.worlds.shares import RankStart, Readable, Share
from distcheck.worlds.stalls import Looks

_PATIENCE_S = 30.0  # with a helper that has ranks to end, and what they have started
_STOPPED_S = 30.0  # for which a helper may be stopped; chosen as for a rank
_LOOK_EVERY_S = 0.2


class Forker:
    """A helper process and what it forked. Close it; nothing outlives it. Several can share one
    selector, and `imports`, the modules that children needed.
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
        self._looks, self._stopped_s = Looks(time.monotonic()), 0.0

    @property
    def usable(self) -> bool:
        """Whether this process may go on using it: its own, and the helper has not ended."""
        if os.getpid() != self._owner:
            return False
        return not self._closed and (not self._opened or self._helper.running)

    def open(self) -> None:
        """Starts the helper; returns at once, while it gets ready."""
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
        """Makes the helper import modules of distcheck's, or torch's compiler, once for all."""
        self._imports.update(dict.fromkeys(modules))

    def wait_ready(self) -> str:
        """Waits until children can be started; returns torch's version.

        Raises CannotRunError when torch cannot be imported.
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
        """Whether the helper was started and is not ready."""
        return self._opened and self._ready is None

    @property
    def start_error(self) -> str:
        """Why the helper could not be made ready; empty where it could, or still may."""
        return "" if self._ready is None else self._ready.error

    def place_of(self, interpreter: int | None) -> "Forker":
        """What forks from a further interpreter; this one for None, and where there are none."""
        return self

    def watch(self, source: Readable | int, on_readable: Callable[[], None]) -> None:
        """Makes `pump` call `on_readable` whenever there is something to read from `source`."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def unwatch(self, source: Readable | int) -> None:
        """Ends that, if it has not ended."""
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
        """Forks a child that calls `target` ("module:function") with the payload of `start`, its
        descriptors and `fds`.

        The caller keeps its own copies of the descriptors. The child lingers after its job until
        there is something to read from `release_fd`, and tells what it is doing when there is from
        `dump_fd`. `child` is what to note it in, if not a new one.
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
            env=in_order(environment, start.order_seed),
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
        """Sends a signal to a child, if it is still there."""
        if child.gone or self._connection is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # it died with the helper
            self._send(messages.Signal(child.key, number))

    def pump(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for something to happen, and takes note of all of it. Raises
        HelperError for a helper that is stopped.
        """
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self.look_at_helper()

    def look_at_helper(self) -> None:
        """Raises HelperError for a helper that is stopped: it would answer nothing, for ever."""
        now = time.monotonic()
        if self._closed or now - self._looks.last < _LOOK_EVERY_S:
            return
        elapsed = self._looks.since_last(now)
        pid = self._helper.pid
        self._stopped_s = self._stopped_s + elapsed if pid and linux.is_stopped(pid) else 0.0
        if self._stopped_s >= _STOPPED_S:
            self._give_up(f"it was stopped (process {pid}, state T, SIGSTOP)")

    def forget(self, child: Child) -> None:
        """Closes a child's descriptors, once; it must be gone."""
        for name in ("_events_fd", "_output_fd", "_stacks_fd"):
            self._close(child, name)
        self._children.pop(child.key, None)

    def close(self) -> None:
        """Ends the helper and with it every child. Ctrl-C is heard when they are gone: what says
        that nothing is left running speaks after it.
        """
        self.let_go()
        if self._opened and os.getpid() == self._owner:
            with interrupts.waiting():
                self._end()

    def let_go(self) -> None:
        """Tells the helper to end, and does not wait for it; `close` it later."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._connection is not None:
            self.unwatch(self._connection)
            # Not only closed: a helper that was forked later has a copy of this end.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None
        for child in list(self._children.values()):
            self.forget(child)
        if not self._shares_selector:
            self._selector.close()

    def _end(self) -> None:
        """Waits until the helper is gone, which was asked to end; kills it when patience runs
        out, or where it is stopped and can do nothing about its end.
        """
        stopped = self._helper.pid and linux.is_stopped(self._helper.pid)
        self._helper.end(0.0 if stopped or self._ready is None else _PATIENCE_S)

    def _send(self, request: messages.Request, fds: Iterable[int] = ()) -> None:
        """Raises HelperError for a helper that takes nothing, OSError for one that is gone."""
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
        """Ends the helper, which can be killed even where it is stopped. Raises HelperError."""
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
            elif notice.key in self._children:  # it was not forgotten
                self._children[notice.key].take(notice.event)

    def _on_events(self, child: Child, frames: Frames) -> None:
        for data in self._read(child, "_events_fd"):
            try:
                events = frames.feed(data)
            except msgspec.DecodeError:
                self._close(child, "_events_fd")
                if child.raised is None:
                    child.take(messages.garbled())
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
        """Everything that is in one of a child's pipes now; closes the pipe at its end."""
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
        """Closes one of a child's descriptors, once: its number may be another child's by now."""
        fd = getattr(child, name)
        if fd >= 0:
            self.unwatch(fd)
            os.close(fd)
            setattr(child, name, -1)


class LocalShare(Share):
    """Ranks of a world that a forker of this process has forked, or its further interpreters."""

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
        """Sends a signal to a rank, if it is still there."""
        for rank, one in self.children.items():
            if one is child:
                self._places[rank].signal(child, number)

    def ask(self) -> None:
        """Makes every rank tell what it is doing."""
        self._close_pipe("_dump")

    def release(self) -> None:
        """Lets ranks that are done leave."""
        self._close_pipe("_release")

    def close(self) -> None:
        for rank, child in self.children.items():
            self._places[rank].forget(child)
        for name in ("_release", "_dump"):
            self._close_pipe(name)

    def _close_pipe(self, name: str) -> None:
        """Tells every child that reads the pipe: by a byte for each, since its end may stay open
        in a helper that was forked from this process later.
        """
        fd = getattr(self, name)
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.write(fd, bytes(len(self.children)))
            os.close(fd)
            setattr(self, name, -1)
