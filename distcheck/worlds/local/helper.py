"""The helper: imports torch once, then forks every rank, reference and check.

It stays single-threaded and never touches a process group, a GPU or code under test, so that its
forks are clean. It ends when the front end exits, and its children end with it. A pidfd detects the
exit, because PR_SET_PDEATHSIG would also react to the end of the thread that started the helper.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import selectors
import signal
import socket
import sys
from collections.abc import Sequence

from distcheck.machine.seeds import PINNED_ENVIRONMENT
from distcheck.worlds import linux, messages, scratch, surroundings
from distcheck.worlds.framing import Line
from distcheck.worlds.local import child, late_compiler
from distcheck.worlds.local.forks import HugePagesForForks

_PRELOADED = ("torch", "torch.distributed", "torch.utils.data")
# Each variant imports these in another order. Their import is fast and without global effects.
_HARMLESS = ("calendar", "colorsys", "csv", "fractions", "graphlib", "html", "plistlib", "wave")


# A cluster's SIGTERM reaches every process of a job at once.
_FRONTS_TO_DECIDE = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
)  # fmt: skip


class Helper:
    """Forks on request, reaps children, and reports to the front end."""

    def __init__(
        self, connection: socket.socket, front_pid: int, forks: HugePagesForForks | None = None
    ) -> None:
        self._line = Line(connection, messages.Request)
        self._forks = forks
        self._children: dict[int, int] = {}  # pid -> key
        self._tried: set[str] = set()  # modules of distcheck
        scratch.prepare_registration()
        self._selector = selectors.DefaultSelector()
        self._front = os.pidfd_open(front_pid)
        self._selector.register(self._front, selectors.EVENT_READ)
        self._selector.register(self._line, selectors.EVENT_READ)
        self._wakeup = self._wake_on_child_exit()
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the front end closes the connection or exits."""
        try:
            while True:
                ready = {key.fileobj for key, _ in self._selector.select()}
                if self._front in ready:
                    return
                if self._wakeup in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                    self._reap()
                if self._line in ready:
                    self._serve()
        except (EOFError, ConnectionError):
            return
        finally:
            self._end_children()
            scratch.remove_registered()

    def say(self, notice: messages.Notice) -> None:
        self._line.send(notice)

    def _say_of(self, key: int, event: messages.ChildEvent) -> None:
        self.say(messages.RoutedEvent(key, event))

    def _wake_on_child_exit(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._wakeup_writer = theirs
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return ours

    def _serve(self) -> None:
        request, fds = self._line.next()
        if isinstance(request, messages.Signal):
            for pid, key in self._children.items():
                if key == request.key:  # not reaped yet, so the pid cannot be reused
                    os.kill(pid, request.signal)
            return
        helper_pid = os.getpid()
        self._import_own([request.target.partition(":")[0], *request.imports])
        if self._forks is not None:
            self._forks.about_to()
        try:
            pid = os.fork()
        except OSError as error:
            self._say_of(request.key, messages.Spawned(0, f"fork: {error.strerror}"))
            pid = -1
        if pid == 0:
            self._become_child(request, fds, helper_pid)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._children[pid] = request.key
            self._say_of(request.key, messages.Spawned(pid))

    def _import_own(self, modules: Sequence[str]) -> None:
        """Import modules of distcheck, and torch's compiler, so that children do not have to import
        them, which takes longer than many jobs. Each module is tried once. Code under test is never
        imported.
        """
        missing = [n for n in modules if child.is_shared(n) and n not in self._tried]
        self._tried.update(missing)
        for name in missing:
            with contextlib.suppress(Exception):  # the child raises the same error and reports it
                if name == late_compiler.NAME:
                    late_compiler.load()
                else:
                    importlib.import_module(name)
        if missing:
            gc.freeze()

    def _become_child(self, request: messages.Spawn, fds: list[int], parent: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            self._selector.close()
            self._line.close()
            self._wakeup.close()
            self._wakeup_writer.close()
            os.close(self._front)
            child.run(request, fds, parent)
        finally:
            os._exit(70)  # child.run never returns; in any case, do not serve as a helper

    def _reap(self) -> None:
        gone = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            gone = True
            key = self._children.pop(pid, None)
            if key is None:
                continue  # an orphan of a rank; its own children are orphans now
            code = os.waitstatus_to_exitcode(status)
            end = messages.Exited(code) if code >= 0 else messages.Exited(None, -code)
            self._say_of(key, end)
        if gone:
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill the processes that a dead rank has left behind; they are now children of this
        process.
        """
        for pid in linux.children_of_self():
            if pid not in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _end_children(self) -> None:
        """Kill children, including adopted orphans, until none is left."""
        while family := linux.children_of_self():
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        self._children.clear()


def main(control_fd: int, front_pid: int, variant: int = 0, imports: Sequence[str] = ()) -> None:
    """Entry point of the helper process, which `pool.py` starts.

    A `variant` above 0 makes extra allocations and imports before torch. `imports` are modules that
    the children will need, in addition to torch.
    """
    _ignore_signals()
    os.environ.update(PINNED_ENVIRONMENT)
    linux.adopt_orphans()
    helper = Helper(socket.socket(fileno=control_fd), front_pid, HugePagesForForks(first=64))
    try:
        if variant:
            _vary_layout(variant)
        version = _preload(imports)
    except Exception as error:
        helper.say(messages.Ready("", f"{type(error).__name__}: {error}"))
        return
    helper.say(messages.Ready(version))
    helper.run()


def serve_forked(control: socket.socket, front_pid: int) -> None:
    """Serve as a helper in a fork of the front end (see `helper_process.py`), until the front end
    ends.
    """
    _ignore_signals()
    signal.set_wakeup_fd(-1)  # the front end's, if it has one
    linux.adopt_orphans()
    gc.freeze()  # garbage collection would touch, and so copy, every inherited page
    helper = Helper(control, front_pid)
    helper.say(messages.Ready(""))
    helper.run()


def _ignore_signals() -> None:
    """Ignore the signals that the front end handles. Also ignore SIGUSR1, which would kill a rank
    that receives it before its handler is registered.
    """
    # If the front end had registered a handler, a rank's own `register` would only change the file.
    faulthandler.unregister(signal.SIGUSR1)
    for name in _FRONTS_TO_DECIDE:
        signal.signal(name, signal.SIG_IGN)


def _vary_layout(variant: int) -> None:
    """Change the memory layout and the order of `sys.modules`, depending on `variant`."""
    surroundings.allocate(variant)
    modules = list(_HARMLESS)
    random.Random(variant).shuffle(modules)
    for name in modules:
        importlib.import_module(name)


def _preload(further: Sequence[str]) -> str:
    # Measured: garbage collection takes a fifth of the import time and finds next to nothing.
    gc.disable()
    for name in (*_PRELOADED, *further):
        importlib.import_module(name)
    late_compiler.install()
    if "numpy" in sys.modules:  # imported by torch; every rank seeds it
        importlib.import_module("numpy.random")
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"importing torch left {threads} threads; forking needs one")
    gc.freeze()  # as in `serve_forked`
    gc.enable()
    return str(sys.modules["torch"].__version__)
