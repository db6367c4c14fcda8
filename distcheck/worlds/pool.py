"""The front's side of the helper: starts children, moves their events, ends them.

One pool serves one front process. Its users decide how many children there are at a time, and call
`pump` until they are done.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from distcheck.errors import CannotRunError, HelperError
from distcheck.worlds import interrupts, messages
from distcheck.worlds.framing import Frames, Line
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.helper_process import (
    NO_TORCH_IN_TIME,
    START_DEADLINE_S,
    CleanHelper,
    HelperProcess,
    child_environment,
    folder_and_path,
    in_order,
)
from distcheck.worlds.local.helper_watch import HelperWatch
from distcheck.worlds.local.local_share import LocalShare
from distcheck.worlds.shares import RankStart, Readable, Share, Shared, descriptors_of

if TYPE_CHECKING:
    from distcheck.worlds.local.interpreters import Interpreters

_PATIENCE_S = 30.0  # with a helper that has ranks to end, and what they have started


class Pool:
    """A helper process and what it forked. Close it; nothing outlives it.

    With `open_interpreters` it has further interpreters, each a pool that shares its selector.
    """

    def __init__(
        self,
        helper: HelperProcess | None = None,
        *,
        selector: selectors.BaseSelector | None = None,
        imports: dict[str, None] | None = None,
    ) -> None:
        self._helper = helper or CleanHelper()
        self._owner = os.getpid()
        self._opened = False
        self._closed = False
        self._children: dict[int, Child] = {}
        self._next_key = 0
        self._imports = {} if imports is None else imports  # what children needed
        self._shares_selector = selector is not None
        self._selector = selector or selectors.DefaultSelector()
        self._interpreters: Interpreters | None = None
        self._connection: socket.socket | None = None
        self._line: Line | None = None
        self._ready: messages.Ready | None = None
        self._watch = HelperWatch(self._helper)

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
                f"torch cannot be imported by {sys.executable}: {self._ready.error}; "
                "distcheck doctor shows more"
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

    def why_no_interpreters(self) -> str:
        """Why ranks cannot be forked from further interpreters; empty where they can be."""
        if self._interpreters is None or not self._interpreters.error:
            return ""
        return f"a further interpreter could not be started: {self._interpreters.error}"

    def open_interpreters(self) -> None:
        """Starts further interpreters for `start_ranks`; returns at once, while they import."""
        if self._interpreters is not None:
            if self._interpreters.usable:
                return
            self._interpreters.close()
        from distcheck.worlds.local.interpreters import Interpreters  # which are pools as well

        self.open()
        self._interpreters = Interpreters(CleanHelper, self._selector, self._imports)
        self._interpreters.advance(others_importing=int(self.importing))

    @property
    def interpreters_ready(self) -> bool:
        """Whether ranks can be forked from the further interpreters."""
        return self._interpreters is not None and self._interpreters.ready

    def place_of(self, interpreter: int | None) -> "Pool":
        """The pool that forks from a further interpreter; this one for None."""
        if interpreter is None:
            return self
        assert self._interpreters is not None, "open_interpreters comes first"
        return self._interpreters[interpreter]

    @property
    def address(self) -> str:
        """An address of this machine at which every rank can reach it."""
        return "127.0.0.1"

    def watch(self, source: Readable | int, on_readable: Callable[[], None]) -> None:
        """Makes `pump` call `on_readable` whenever there is something to read from `source`."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def unwatch(self, source: Readable | int) -> None:
        """Ends that, if it has not ended."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def share_data(self, name: str, data_dir: str, *, download: bool) -> dict[str, bytes]:
        """Makes processes elsewhere read the data set too; what each found, by its name."""
        return {}

    def ranks_here(self, world: int) -> int:
        """How many ranks of a world are on this machine."""
        return world

    def describe(self) -> dict[str, Any]:
        """How ranks come to exist, for a report; nothing where they are simply forked here."""
        return {}

    def start_ranks(
        self,
        target: str,
        starts: Sequence[RankStart],
        fds: Mapping[str, Shared],
        *,
        together: bool = False,
    ) -> list[Share]:
        """Starts the ranks of a world, in as many shares as there are places for them; or all
        `together`, where they are part of a job that was started here.
        """
        own = dict(enumerate(starts))
        return [LocalShare(self, target=target, starts=own, fds=descriptors_of(fds))]

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
        own = {**child_environment(), **self._helper.variables(), **start.environment}
        self.wait_ready()
        folder, path = folder_and_path(self._helper)
        child = child or Child()
        child.key = self._next_key
        self._next_key += 1
        self._children[child.key] = child
        events, output = child.open_pipes()
        frames = Frames(messages.Event)
        self._selector.register(
            child._events_fd, selectors.EVENT_READ, lambda: self._on_events(child, frames)
        )
        self._selector.register(
            child._output_fd, selectors.EVENT_READ, lambda: self._on_output(child)
        )
        spawn = messages.Spawn(
            key=child.key,
            target=target,
            payload=start.payload,
            cwd=folder,
            path=path,
            env=in_order(own, start.order_seed),
            given=list(fds),
            fd_names=list(start.named_fds),
            imports=list(self._imports),
        )
        assert self._connection is not None
        assert self._line is not None
        try:
            self._connection.settimeout(_PATIENCE_S)
            given = [events, output, child._stacks_fd, release_fd, dump_fd, *fds.values()]
            given += start.named_fds.values()
            self._line.send(spawn, given)
        except TimeoutError:
            self._watch.give_up(f"it took no message for {_PATIENCE_S:g} s")
        except (BrokenPipeError, ConnectionError):
            self._helper_died()
        finally:
            self._connection.setblocking(False)
            os.close(events)
            os.close(output)
        return child

    def signal(self, child: Child, number: int) -> None:
        """Sends a signal to a child, if it is still there."""
        if child.gone or self._connection is None or self._line is None:
            return
        try:
            self._connection.settimeout(_PATIENCE_S)
            self._line.send(messages.Signal(child.key, number))
        except TimeoutError:
            self._watch.give_up(f"it took no message for {_PATIENCE_S:g} s")
        except (BrokenPipeError, ConnectionError):
            pass  # the helper is gone, and the child died with it
        finally:
            self._connection.setblocking(False)

    def pump(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for something to happen, and takes note of all of it."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self.look_at_helper()
        if self._interpreters is not None:
            self._interpreters.advance(others_importing=int(self.importing))

    def look_at_helper(self) -> None:
        """Raises HelperError where the helper, or that of a further interpreter, is stopped."""
        if self._closed:
            return
        self._watch.look()
        if self._interpreters is not None:
            self._interpreters.look()

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
                if self._interpreters is not None:
                    self._interpreters.close()
                self._watch.end(0.0 if self._ready is None else _PATIENCE_S)

    def let_go(self) -> None:
        """Tells the helper to end, and does not wait for it; `close` it later."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._interpreters is not None:
            self._interpreters.let_go()
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

    def _on_notices(self) -> None:
        assert self._line is not None
        try:
            notices = self._line.receive()
        except (EOFError, ConnectionError):
            self._helper_died()
            return
        for notice in notices:
            self._take_notice(notice)

    def _take_notice(self, notice: messages.Notice) -> None:
        if isinstance(notice, messages.Ready):
            self._ready = notice
        elif (child := self._children.get(notice.key)) is None:
            pass  # it was forgotten
        elif isinstance(notice, messages.Spawned):
            child.pid, child.spawn_error = notice.pid, notice.error
            child.gone = bool(notice.error)
        else:
            child.exit_code, child.exit_signal = notice.code, notice.signal
            child.gone = True

    def _on_events(self, child: Child, frames: Frames) -> None:
        for data in self._read(child, "_events_fd"):
            try:
                events = frames.feed(data)
            except msgspec.DecodeError:
                self._end_garbled(child)
                return
            for event in events:
                child.take(event)
                if isinstance(event, messages.Done):
                    self.will_need(event.imported)

    def _end_garbled(self, child: Child) -> None:
        self._close(child, "_events_fd")
        if child.raised is None:
            child.take(messages.garbled())
        self.signal(child, signal.SIGKILL)

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

    def _helper_died(self) -> None:
        last = self._helper.last_words() or "it said nothing"
        raise HelperError(
            f"the process that forks the ranks ended unexpectedly: {last}; "
            "out of memory is the usual reason"
        )
