"""Two kinds of helper process: a fresh interpreter and a fork of this process.

CleanHelper    a new interpreter that imports torch and nothing else: for code under test that
               ranks import by name
ForkedHelper   a fork of this process: for code that exists only here, such as a test with its
               fixtures and examples, which ranks inherit
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Protocol

import distcheck
from distcheck.errors import FolderGoneError
from distcheck.machine.resources import KEEPS_FREED_MEMORY
from distcheck.machine.seeds import PINNED_ENVIRONMENT
from distcheck.worlds.local.forks import HugePagesForForks
from distcheck.worlds.surroundings import HASH_SEED

_POLL_S = 0.001
_forks = HugePagesForForks(first=4)  # each fork stands for the forks of a world

# Use the front end's own package, wherever `path` would find one: two installations may be
# importable, such as a checkout and an installed release.
_PROGRAM = """
import importlib.util, sys
sys.path[:] = {path!r}
spec = importlib.util.spec_from_file_location("distcheck", {package!r} + "/__init__.py")
sys.modules["distcheck"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from distcheck.worlds.local.helper import main
main({control}, {front}, {variant}, {imports!r})
"""
START_DEADLINE_S = 300.0  # importing torch from a cold network disk takes minutes
NO_TORCH_IN_TIME = (
    f"importing torch took over {START_DEADLINE_S:.0f} s; run `python -c 'import torch'` until "
    "it is fast, then rerun distcheck"
)


class HelperProcess(Protocol):
    """Interface between a pool and its helper process."""

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        """Start the process with `control` as its connection. The process closes its copy of
        `ours`, the other end. `imports` are modules that its children will need in addition to
        torch.
        """
        ...

    @property
    def pid(self) -> int:
        """Process id; 0 before the process was started."""
        ...

    @property
    def running(self) -> bool:
        """True from `start` until the process has ended."""
        ...

    def end(self, patience_s: float) -> None:
        """Wait until the process has exited; kill it when the patience runs out."""
        ...

    def last_words(self) -> str:
        """Return the last line that the process printed, if it is known."""
        return ""

    def import_path(self) -> list[str]:
        """Return `sys.path` for its children: unchanged by default."""
        return list(sys.path)

    def variables(self) -> dict[str, str]:
        """Return environment variables for its children; none by default."""
        return {}


class CleanHelper(HelperProcess):
    """A new single-threaded interpreter with torch imported.

    PYTHONHASHSEED is fixed, so that a replay uses the same value. A `variant` above 0 makes extra
    imports and allocations before torch.
    """

    def __init__(self, *, hash_seed: int = HASH_SEED, variant: int = 0) -> None:
        self._hash_seed, self._variant = hash_seed, variant
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        program = _PROGRAM.format(
            path=self.import_path(),
            package=os.path.dirname(distcheck.__file__),
            control=control.fileno(),
            front=os.getpid(),
            variant=self._variant,
            imports=list(imports),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            env={**KEEPS_FREED_MEMORY, **child_environment(), **self.variables()},
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # the front end handles Ctrl-C
        )

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self, patience_s: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def last_words(self) -> str:
        """Return the last line that the interpreter printed, usually an exception."""
        if self._output.closed:
            return ""
        self._output.seek(0)
        said = self._output.read().decode(errors="replace").strip()
        return said.splitlines()[-1] if said else ""

    def import_path(self) -> list[str]:
        """Return `sys.path` with absolute paths. The current folder, if present, moves to the end,
        so that a file such as random.py shadows no module; `loading` adds the folder again for the
        user's own code.
        """
        path, here = [os.path.abspath(entry) for entry in sys.path], os.getcwd()
        return sorted(path, key=lambda entry: entry == here)

    def variables(self) -> dict[str, str]:
        return {"PYTHONHASHSEED": str(self._hash_seed)}


class ForkedHelper(HelperProcess):
    """A fork of this process: single-threaded, and with a copy of this process's memory."""

    def __init__(self) -> None:
        self._pid = 0

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        """Fork. The child serves its connection until that is closed, and does not return."""
        from distcheck.worlds.local import helper  # here, so that the fork does not have to

        front = os.getpid()
        _forks.about_to()
        with warnings.catch_warnings():
            # Python 3.12 warns about forking with threads. The fork has none of them; if one of
            # them held a lock, `deadline_s` ends the rank.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid:
            return
        try:
            os.setsid()
            ours.close()
            helper.serve_forked(control, front)
        finally:
            os._exit(70)

    @property
    def pid(self) -> int:
        """Process id of the fork; 0 after it has exited."""
        return self._pid

    @property
    def running(self) -> bool:
        """True if the fork is running. If it has exited, it is reaped."""
        return self._pid > 0 and not self._reap(os.WNOHANG)

    def end(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self.running:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                self._reap(0)
                return
            time.sleep(_POLL_S)

    def _reap(self, flags: int) -> bool:
        try:
            pid, _ = os.waitpid(self._pid, flags)
        except ChildProcessError:
            pid = self._pid
        if pid:
            self._pid = 0
        return pid != 0


def folder_and_path(helper: HelperProcess) -> tuple[str, list[str]]:
    """Return the working directory and the `sys.path` of a helper's children. Raises
    FolderGoneError if the directory no longer exists.
    """
    try:
        return os.getcwd(), helper.import_path()
    except FileNotFoundError:
        raise FolderGoneError from None


def child_environment() -> dict[str, str]:
    """Return this process's environment, with the variables pinned that every rank needs."""
    pinned = {**PINNED_ENVIRONMENT, "TORCH_FR_BUFFER_SIZE": "64"}
    environment = {**os.environ, **pinned}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("TP_SOCKET_IFNAME", environment["GLOO_SOCKET_IFNAME"])  # rpc's
    return environment


def shuffled_variables(variables: dict[str, str], seed: int | None) -> dict[str, str]:
    """Return environment variables in an order drawn from `seed`; unchanged for None."""
    if seed is None:
        return variables
    names = list(variables)
    random.Random(seed).shuffle(names)
    return {name: variables[name] for name in names}
