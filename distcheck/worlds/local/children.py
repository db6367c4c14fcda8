"""Front-end handle of one forked process: its messages, its state, and how it ended."""

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from distcheck.worlds import linux, messages
from distcheck.worlds.call_log import LoggedCall, is_within_call, read_logged_calls

# Python 3.14 appends them after a fatal signal.
_C_FRAMES = re.compile(r"\n*Current thread's C stack trace .*?(?=\n\n|\Z)", re.DOTALL)
_OUTPUT_KEPT_BYTES = 64 * 1024  # per child; the end of the output usually contains the reason


@dataclass(eq=False)
class Child:
    """Front-end handle of one forked process."""

    key: int = -1
    pid: int = 0
    spawn_error: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
    gone: bool = False
    lost: str = ""  # why its state is unknown: its machine is unreachable
    shaken: bool = False  # asked for its stacks by a signal, which may have killed it
    cut_short: bool = False  # killed by distcheck before it had reported
    ended: bool = False  # by distcheck, because it did not answer
    released: bool = False  # allowed to exit, while it was there
    stopped: bool = False  # found in state T, in which it cannot answer
    woken: bool = False  # sent nothing before a signal asked it, and a signal can wake a rank
    late: bool = False  # done only after it was asked for its stacks, which can wake a rank
    done: messages.Done | None = None
    raised: messages.Raised | None = None
    stacks: messages.Stacks | None = None
    proven: messages.Proven | None = None  # why its world could not proceed, if that is known
    remarks: list[messages.Remarked] = field(default_factory=list)  # notes on its whole world
    waits: messages.Blocked | None = None  # its report that it is blocked
    waits_count: int = 0  # number of such reports and retractions
    progress: messages.Progress | None = None
    progress_count: int = 0
    output_left_out: int = 0  # bytes written before those in `output`
    on_progress: Callable[[messages.Progress], None] = lambda _: None
    on_said: Callable[[bytes], None] = lambda _: None
    on_output: Callable[[bytes], None] | None = None
    _output: deque[bytes] = field(default_factory=deque)
    _output_bytes: int = 0
    _events_fd: int = -1
    _output_fd: int = -1
    _stacks_fd: int = -1

    def open_pipes(self) -> tuple[int, int]:
        """Open the pipes for the child's messages and output. Return the child's ends of both."""
        self._events_fd, events = os.pipe()
        self._output_fd, output = os.pipe()
        self._stacks_fd = os.memfd_create("distcheck-stacks")
        for fd in (self._events_fd, self._output_fd):
            os.set_blocking(fd, False)
        return events, output

    @property
    def starting(self) -> bool:
        """True if the child is not forked yet: its helper may have others to fork first."""
        return not (self.pid or self.spawn_error or self.gone)

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the child ran or waited for a core; see `stalls.py`."""
        return linux.busy_seconds(self.pid, main_by_the_clock=self._only_looks) if self.pid else 0.0

    @property
    def known_at(self) -> float:
        """Time (monotonic seconds) at which the known state of the child was valid. For a local
        process, this is now.
        """
        return time.monotonic()

    @property
    def is_awake(self) -> bool:
        """True if the child runs, is runnable, or waits for I/O in the kernel; or if it has run
        after it reported that it is blocked, in which case it may not have retracted the report
        yet.
        """
        if not self.pid:
            return False
        ran_ns = 0 if self.waits is None else self.waits.ran_ns
        if ran_ns > 0 and linux.main_thread_run_ns(self.pid) != ran_ns:
            return True
        return linux.is_awake(self.pid, main_by_the_clock=self._only_looks)

    @property
    def _only_looks(self) -> bool:
        """True if the main thread has reported that it is blocked, and will retract the report
        before it continues. Until then it only polls.
        """
        return self.waits is not None and self.waits.ran_ns == 0 and not self.waits.over

    @property
    def is_stopped(self) -> bool:
        return bool(self.pid) and not self.gone and linux.is_stopped(self.pid)

    @property
    def output(self) -> str:
        """The last part of the child's stdout and stderr."""
        return b"".join(self._output).decode(errors="replace")

    @property
    def low_level_stacks(self) -> str:
        """Output of faulthandler without C frames: of a fatal signal, or requested by SIGUSR1."""
        with contextlib.suppress(OSError):
            written = os.pread(self._stacks_fd, 65536, 0).rstrip(b"\0")  # up to the call log
            return _C_FRAMES.sub("", written.decode(errors="replace"))
        return ""

    @property
    def called(self) -> list[LoggedCall]:
        return read_logged_calls(self._stacks_fd)

    @property
    def was_within_call(self) -> bool:
        return is_within_call(self._stacks_fd)

    def take(self, event: messages.AnyEvent) -> None:
        if isinstance(event, messages.Progress):
            self.progress = event
            self.progress_count += 1
            self.on_progress(event)
        elif isinstance(event, messages.UserMessage):
            self.on_said(event.payload)
        elif isinstance(event, messages.Done):
            self.done = event
            self.late = self.shaken or self.stacks is not None
        elif isinstance(event, messages.Raised):
            self.raised = event
            self.woken = self.shaken and self.stacks is None
        elif isinstance(event, messages.Blocked | messages.Unblocked):
            self.waits = event if isinstance(event, messages.Blocked) else None
            self.waits_count += 1
        elif isinstance(event, messages.Proven):
            self.proven = event
        elif isinstance(event, messages.Stacks):
            self.stacks = event
            self.woken = self.shaken
        elif isinstance(event, messages.Printed):
            self.take_output(event.data)
        elif isinstance(event, messages.Spawned):
            self.pid, self.spawn_error = event.pid, event.error
            self.gone = bool(event.error)
        elif isinstance(event, messages.Exited):
            self.exit_code, self.exit_signal = event.code, event.signal
            self.gone = True

    def forget_output(self) -> None:
        self._output.clear()
        self._output_bytes = self.output_left_out = 0

    def take_output(self, data: bytes) -> None:
        if self.on_output is not None:
            self.on_output(data)
        self._output.append(data)
        self._output_bytes += len(data)
        while self._output_bytes - len(self._output[0]) >= _OUTPUT_KEPT_BYTES:
            dropped = len(self._output.popleft())
            self._output_bytes -= dropped
            self.output_left_out += dropped
