"""The front's side of the helper: starts children, moves their events, ends them.

One pool serves one front process. It is not a scheduler: whoever starts children decides how
many at a time, and calls `pump` until they are done.
"""

import contextlib
import os
import selectors
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from distcheck.errors import CannotRunError, HelperError
from distcheck.worlds import messages
from distcheck.worlds.helper_process import CleanHelper, HelperProcess, child_environment

_OUTPUT_KEPT_BYTES = 64 * 1024  # per child; the end of it, where the reason usually is
_PATIENCE_S = 5.0  # with a helper whose connection was closed
_START_DEADLINE_S = 300.0  # importing torch from a cold network disk takes minutes


@dataclass(eq=False)
class Child:
    """One forked process, as the front sees it."""

    key: int
    pid: int = 0
    spawn_error: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
    gone: bool = False
    released: bool = False  # told that it may leave, while it was there
    done: messages.Done | None = None
    raised: messages.Raised | None = None
    stacks: messages.Stacks | None = None
    progress: messages.Progress | None = None
    progress_count: int = 0
    on_progress: Callable[[messages.Progress], None] | None = None
    on_said: Callable[[bytes], None] | None = None
    on_output: Callable[[bytes], None] | None = None
    _output: deque[bytes] = field(default_factory=deque)
    _output_bytes: int = 0
    _events_fd: int = -1
    _output_fd: int = -1
    _stacks_fd: int = -1

    @property
    def output(self) -> str:
        """The end of what the child wrote to stdout and stderr."""
        return b"".join(self._output).decode(errors="replace")

    @property
    def low_level_stacks(self) -> str:
        """What faulthandler wrote: on a fatal signal, or when asked with SIGUSR1."""
        with contextlib.suppress(OSError):
            return os.pread(self._stacks_fd, 65536, 0).decode(errors="replace")
        return ""

    def take(self, event: messages.Event) -> None:
        """Notes an event."""
        if isinstance(event, messages.Progress):
            self.progress = event
            self.progress_count += 1
            if self.on_progress is not None:
                self.on_progress(event)
        elif isinstance(event, messages.Said):
            if self.on_said is not None:
                self.on_said(event.payload)
        elif isinstance(event, messages.Done):
            self.done = event
        elif isinstance(event, messages.Raised):
            self.raised = event
        else:
            self.stacks = event

    def forget_output(self) -> None:
        """Begins anew, with nothing kept."""
        self._output.clear()
        self._output_bytes = 0

    def take_output(self, data: bytes) -> None:
        """Keeps the end of the output."""
        if self.on_output is not None:
            self.on_output(data)
        self._output.append(data)
        self._output_bytes += len(data)
        while self._output_bytes - len(self._output[0]) >= _OUTPUT_KEPT_BYTES:
            self._output_bytes -= len(self._output.popleft())


class Pool:
    """A helper process and what it forked. Close it; nothing outlives it."""

    def __init__(self, helper: HelperProcess | None = None) -> None:
        self._helper = helper or CleanHelper()
        self._owner = os.getpid()
        self._opened = False
        self._closed = False
        self._children: dict[int, Child] = {}
        self._next_key = 0
        self._selector = selectors.DefaultSelector()
        self._connection: socket.socket | None = None
        self._notices = messages.Frames(messages.Notice)
        self._ready: messages.Ready | None = None

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
        self._helper.start(theirs, ours=ours)
        self._opened = True
        theirs.close()
        ours.setblocking(False)
        self._connection = ours
        self._selector.register(ours, selectors.EVENT_READ, self._on_notices)

    def wait_ready(self) -> str:
        """Waits until children can be started; returns torch's version.

        Raises CannotRunError when torch cannot be imported.
        """
        self.open()
        waited_s = 0.0
        while self._ready is None:
            self.pump(0.5)
            waited_s += 0.5
            if waited_s > _START_DEADLINE_S:
                raise CannotRunError(f"importing torch took more than {_START_DEADLINE_S:.0f} s")
        if self._ready.error:
            raise CannotRunError(
                f"torch cannot be imported by {sys.executable}: {self._ready.error}; "
                "distcheck doctor shows more"
            )
        return self._ready.torch_version

    def start(
        self,
        target: str,
        payload: bytes,
        *,
        fds: list[int],
        release_fd: int,
        dump_fd: int,
        env: dict[str, str],
    ) -> Child:
        """Forks a child that calls `target` ("module:function") with `payload` and `fds`.

        The caller keeps its own copies of the descriptors. The child lingers after its job
        until `release_fd` reaches its end, and tells what it is doing when `dump_fd` does.
        """
        self.wait_ready()
        child = Child(self._next_key)
        self._next_key += 1
        self._children[child.key] = child
        child._events_fd, events = os.pipe()
        child._output_fd, output = os.pipe()
        child._stacks_fd = os.memfd_create("distcheck-stacks")
        for fd in (child._events_fd, child._output_fd):
            os.set_blocking(fd, False)
        frames = messages.Frames(messages.Event)
        self._selector.register(
            child._events_fd, selectors.EVENT_READ, lambda: self._on_events(child, frames)
        )
        self._selector.register(
            child._output_fd, selectors.EVENT_READ, lambda: self._on_output(child)
        )
        spawn = messages.Spawn(
            key=child.key,
            target=target,
            payload=payload,
            cwd=os.getcwd(),
            path=self._helper.import_path(),
            env={**child_environment(), **env},
        )
        assert self._connection is not None
        try:
            self._connection.setblocking(True)
            given = [events, output, child._stacks_fd, release_fd, dump_fd, *fds]
            messages.send_with_fds(self._connection, spawn, given)
        except (BrokenPipeError, ConnectionError):
            self._helper_died()
        finally:
            self._connection.setblocking(False)
            os.close(events)
            os.close(output)
        return child

    def signal(self, child: Child, number: int) -> None:
        """Sends a signal to a child, if it is still there."""
        if child.gone or self._connection is None:
            return
        try:
            self._connection.setblocking(True)
            self._connection.sendall(messages.frame(messages.Signal(child.key, number)))
        except (BrokenPipeError, ConnectionError):
            pass  # the helper is gone, and the child died with it
        finally:
            self._connection.setblocking(False)

    def pump(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for something to happen, and takes note of all of it."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def forget(self, child: Child) -> None:
        """Closes a child's descriptors; it must be gone."""
        for name in ("_events_fd", "_output_fd"):
            self._close_pipe(child, name)
        os.close(child._stacks_fd)
        self._children.pop(child.key, None)

    def close(self) -> None:
        """Ends the helper and with it every child."""
        self.let_go()
        if self._opened and os.getpid() == self._owner:
            self._helper.end(_PATIENCE_S)

    def let_go(self) -> None:
        """Tells the helper to end, and does not wait for it; `close` it later."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for child in list(self._children.values()):
            self.forget(child)
        self._selector.close()

    def _on_notices(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._helper_died()
        for notice in self._notices.feed(data):
            self._take_notice(notice)

    def _take_notice(self, notice: messages.Notice) -> None:
        if isinstance(notice, messages.Ready):
            self._ready = notice
            return
        child = self._children.get(notice.key)
        if child is None:
            return
        if isinstance(notice, messages.Spawned):
            child.pid, child.spawn_error = notice.pid, notice.error
            child.gone = bool(notice.error)
            return
        # Whatever the child said before it died is in the pipes already: take it first.
        for fd in (child._events_fd, child._output_fd):
            if fd >= 0:
                self._selector.get_key(fd).data()
        child.exit_code, child.exit_signal = notice.code, notice.signal
        child.gone = True

    def _on_events(self, child: Child, frames: messages.Frames) -> None:
        for data in self._read(child, "_events_fd"):
            for event in frames.feed(data):
                child.take(event)

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
                self._close_pipe(child, name)
                return parts
            parts.append(data)

    def _close_pipe(self, child: Child, name: str) -> None:
        """Closes one of a child's pipes, once: its number may be another child's by now."""
        fd = getattr(child, name)
        if fd >= 0:
            self._selector.unregister(fd)
            os.close(fd)
            setattr(child, name, -1)

    def _helper_died(self) -> None:
        last = self._helper.last_words() or "it said nothing"
        raise HelperError(
            f"the process that forks the ranks ended unexpectedly: {last}; "
            "out of memory is the usual reason"
        )
