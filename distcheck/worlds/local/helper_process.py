"""Two ways for a helper process to come to exist.

CleanHelper    a new interpreter that imports torch and nothing else: for code that is
               judged, which its ranks load by name
ForkedHelper   a fork of this very process: for code that is here already, a test with its
               fixtures and examples, which its ranks inherit
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
from distcheck.worlds.local.forks import ManyForks
from distcheck.worlds.surroundings import HASH_SEED

_POLL_S = 0.001
_forks = ManyForks(first=4)  # of this process; each stands for those of a world, too

# The package is the front's own, wherever `path` would find one: two installations can be within
# reach, as in a checkout of an environment that has another.
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
    """What a pool needs of the process that forks for it."""

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        """Starts it with `control` as its connection; `ours` is the other end, which it drops.
        `imports` are modules that its children will need beside torch.
        """
        ...

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was started."""
        ...

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        ...

    def end(self, patience_s: float) -> None:
        """Waits until it is gone; kills it when patience runs out."""
        ...

    def last_words(self) -> str:
        """The last line that it wrote, if that is known."""
        return ""

    def import_path(self) -> list[str]:
        """`sys.path` for what it forks: as it is here."""
        return list(sys.path)

    def variables(self) -> dict[str, str]:
        """Environment variables that say of it what is so, for what it forks; none here."""
        return {}


class CleanHelper(HelperProcess):
    """A new interpreter that has imported torch, single-threaded.

    Its PYTHONHASHSEED is fixed, so that a replay has the same one. A `variant` above 0 differs in
    what it imports and allocates before torch.
    """

    def __init__(self, *, hash_seed: int = HASH_SEED, variant: int = 0) -> None:
        self._hash_seed, self._variant = hash_seed, variant
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        """Returns at once, while it imports torch."""
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
            start_new_session=True,  # Ctrl-C is the front's to handle
        )

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self, patience_s: float) -> None:
        """Waits for the interpreter to end, and then kills it."""
        if self._process is None:
            return
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def last_words(self) -> str:
        """The last line that the interpreter printed, as a rule an exception."""
        if self._output.closed:
            return ""
        self._output.seek(0)
        said = self._output.read().decode(errors="replace").strip()
        return said.splitlines()[-1] if said else ""

    def import_path(self) -> list[str]:
        """`sys.path` made absolute. The current folder comes last, where its random.py shadows
        nothing, and only if it is there: `loading` adds it for a person's own code.
        """
        path, here = [os.path.abspath(entry) for entry in sys.path], os.getcwd()
        return sorted(path, key=lambda entry: entry == here)

    def variables(self) -> dict[str, str]:
        """The seed of its hashes."""
        return {"PYTHONHASHSEED": str(self._hash_seed)}


class ForkedHelper(HelperProcess):
    """A fork of this process: single-threaded by nature, with all of its memory."""

    def __init__(self) -> None:
        self._pid = 0

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        """Forks; the fork serves its connection until that ends, and never returns here."""
        from distcheck.worlds.local import helper  # here, so that the fork does not have to

        front = os.getpid()
        _forks.about_to()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking where threads are. The fork has none of them, and
            # whatever lock one of them held is what `deadline_s` is for.
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
        """That of the fork; 0 as well when it is gone."""
        return self._pid

    @property
    def running(self) -> bool:
        """Whether the fork is there; reaps it when it is not."""
        return self._pid > 0 and not self._reap(os.WNOHANG)

    def end(self, patience_s: float) -> None:
        """Waits for the fork to end, and then kills it."""
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
    """The working directory, and `sys.path` for what a helper forks. Raises FolderGoneError where
    the former is gone.
    """
    try:
        return os.getcwd(), helper.import_path()
    except FileNotFoundError:
        raise FolderGoneError from None


def child_environment() -> dict[str, str]:
    """This process's environment, with what must be pinned in every rank."""
    pinned = {**PINNED_ENVIRONMENT, "TORCH_FR_BUFFER_SIZE": "64"}
    environment = {**os.environ, **pinned}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("TP_SOCKET_IFNAME", environment["GLOO_SOCKET_IFNAME"])  # rpc's
    return environment


def in_order(variables: dict[str, str], seed: int | None) -> dict[str, str]:
    """Environment variables in an order that is drawn, or as they are."""
    if seed is None:
        return variables
    names = list(variables)
    random.Random(seed).shuffle(names)
    return {name: variables[name] for name in names}
