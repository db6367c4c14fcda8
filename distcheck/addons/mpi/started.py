"""MPI jobs whose ranks are forked by distcheck's helper process instead of by MPI.

mpirun starts a stand-in process for each rank. The rank takes over the environment and the
connections of its stand-in (docs/decisions/mpi.md).

    front end -> keeper.py -> mpirun -> stand_in.py, one for each rank
"""

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from distcheck import private
from distcheck.addons.mpi import library
from distcheck.errors import CannotRunError
from distcheck.worlds import keeper
from distcheck.worlds.shares import RankStart

_START_DEADLINE_S = 120.0
_PATIENCE_S = 10.0  # time for a supervisor to end
_POLL_S = 0.05
_HERE = Path(__file__).parent
_SHARED_MEMORY = "/dev/shm"
# Variables of a stand-in itself, which its rank must not inherit.
_NOT_PASSED_ON = ("TMPDIR", "PWD", "OLDPWD", "SHLVL", "_")
# Ranks of one machine communicate through shared memory only. Measured: probing networks costs Open
# MPI 1 s.
_SETTINGS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^tcp,ofi,uct,openib,usnic",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "FI_TCP_IFACE": "lo",
    "UCX_NET_DEVICES": "lo",
}
# Where Open MPI 5 and 4 create the shared memory itself.
_MEMORY_FOLDERS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")


class MPIJob:
    """A started MPI job whose ranks will join it. Must be closed after its ranks have exited.

    `environments` holds the variables to add for each rank. `connections` holds the file
    descriptors that a rank needs; the keys are the variables that contain their numbers.
    """

    def __init__(self, size: int) -> None:
        self.environments: list[dict[str, str]] = [{} for _ in range(size)]
        self.connections: list[dict[str, int]] = [{} for _ in range(size)]
        self._stand_ins: list[socket.socket] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._keeper: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        launcher = _launcher()
        folder = _new_folder()
        try:
            with theirs, socket.socket(socket.AF_UNIX) as server:
                server.bind(os.path.join(folder, "s"))
                server.listen(size)
                self._keeper = _start_keeper(launcher, size, folder, theirs, self._output)
                self._receive_environments(server, size, launcher)
        except BaseException:
            self.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def enlist(self, rank: int, start: RankStart) -> RankStart:
        """Return the start of a rank, with the environment and the descriptors of its stand-in
        added.
        """
        return replace(
            start,
            environment={**start.environment, **self.environments[rank]},
            named_fds={**start.named_fds, **self.connections[rank]},
        )

    def close(self) -> None:
        """End the launcher and all processes that it has started; wait until they have exited."""
        if os.getpid() != self._owner:
            return
        for connection in (*self._stand_ins, self._control):
            # Closing is not enough: a helper that was forked later has a copy of this end.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._stand_ins.clear()
        self.let_go_of_connections()
        if self._keeper is not None:
            try:
                self._keeper.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None
        self._output.close()

    def let_go_of_connections(self) -> None:
        """Close this process's copies of the ranks' descriptors."""
        for named in self.connections:
            for fd in named.values():
                os.close(fd)
            named.clear()

    def _receive_environments(
        self, server: socket.socket, size: int, launcher: library.Launcher
    ) -> None:
        """Receive the environment of every stand-in. Raises CannotRunError."""
        assert self._keeper is not None
        deadline = time.monotonic() + _START_DEADLINE_S
        while len(self._stand_ins) < size:
            ready, _, _ = select.select([server, self._control], [], [], _POLL_S)
            if server in ready:
                connection, _ = server.accept()
                self._stand_ins.append(connection)
                self._take_over(connection, size)
            elif self._control in ready or self._keeper.poll() is not None:
                raise CannotRunError(
                    f"{launcher.path} could not start {size} processes{self._error_lines()}"
                )
            elif time.monotonic() > deadline:
                raise CannotRunError(
                    f"{launcher.path} has not started {size} processes within "
                    f"{_START_DEADLINE_S:.0f} s{self._error_lines()}"
                )

    def _take_over(self, connection: socket.socket, size: int) -> None:
        connection.settimeout(_START_DEADLINE_S)
        first, fds, _, _ = socket.recv_fds(connection, 1, 1)
        with connection.makefile("rb") as stream:
            length = int.from_bytes(first + stream.read(3), "little")
            variables: dict[str, str] = json.loads(stream.read(length))
        rank = int(variables.get("PMIX_RANK") or variables.get("PMI_RANK") or -1)
        if not 0 <= rank < size:
            raise CannotRunError(
                f"an MPI launcher started a process without a rank from 0 to {size - 1}: neither "
                "PMIX_RANK nor PMI_RANK; use Open MPI 4 or newer, or MPICH"
            )
        self.connections[rank] = {"PMI_FD": fds[0]} if fds else {}
        self.environments[rank] |= {
            name: value
            for name, value in variables.items()
            if os.environ.get(name) != value and name not in _NOT_PASSED_ON
        }

    def _error_lines(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        words = [line.strip() for line in lines if line.strip(" -=")]
        return f": {' '.join(words)[:500]}" if words else ""


def _launcher() -> library.Launcher:
    launcher = library.find_launcher()
    if launcher is None:
        raise CannotRunError(
            "ranks on backend mpi need mpirun or mpiexec, which is neither next to this Python "
            f"nor on PATH; {library.INSTALL}, or pip install mpich"
        )
    return launcher


def _new_folder() -> str:
    """Create a folder for all files of the launcher and the library, in memory if possible. Return
    its path.
    """
    base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None
    place = Path(base or tempfile.gettempdir(), private.unique("distcheck-mpi-"))
    return str(private.folder(place, is_new=True))


def _start_keeper(
    launcher: library.Launcher, size: int, folder: str, control: socket.socket, said: IO[bytes]
) -> "subprocess.Popen[bytes]":
    stand_in = [*keeper.PYTHON, str(_HERE / "stand_in.py"), os.path.join(folder, "s")]
    command = [launcher.path, *_options(launcher), "-n", str(size), *stand_in]
    settings = dict(_SETTINGS)
    if launcher.library:
        settings["MPI4PY_LIBMPI"] = launcher.library
    if folder.startswith(_SHARED_MEMORY):
        settings |= dict.fromkeys(_MEMORY_FOLDERS, folder)
    # The user's own settings take precedence.
    environment = {**settings, **library.clean_environment(), "TMPDIR": folder}
    return keeper.start_kept(command, control, env=environment, output=said, folder=folder)


def _options(launcher: library.Launcher) -> list[str]:
    if launcher.kind == "MPICH":
        return ["-launcher", "fork", "-hosts", "localhost"]
    return ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
