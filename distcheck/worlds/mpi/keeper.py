"""Run as a program, with the standard library alone: keeps an MPI launcher.

Starts it, waits until the front lets go or dies, and then ends it, everything that it has started,
and the files that it left. A launcher cannot be trusted with that: killed, it leaves its folder,
and MPICH's ranks, killed, their shared memory.
"""

import contextlib
import ctypes
import glob
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 1.0  # with a launcher whose stand-ins have left
_SHARED_FILES = "/dev/shm/mpich_shm_*"
_USED_FOR_S = 5.0  # by ranks that are being killed at this moment


def keep(front_pid: int, control_fd: int, folder: str, command: list[str]) -> None:
    """Runs `command` until `control_fd` ends or the process `front_pid` does."""
    control = socket.socket(fileno=control_fd)
    begun = time.time()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with subprocess.Popen(command, restore_signals=True) as launcher:
            _wait(front_pid, control, launcher)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(_PATIENCE_S)
            _end_children()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_shared_files(begun)


def _wait(front_pid: int, control: socket.socket, launcher: "subprocess.Popen[bytes]") -> None:
    try:
        watched = [control.fileno(), os.pidfd_open(front_pid), os.pidfd_open(launcher.pid)]
    except OSError:
        return  # one of them is gone already
    select.select(watched, [], [])


def _end_children() -> None:
    """Kills until none is left; a process that loses its parent becomes a child of this process."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(path) as file:
            family = [int(pid) for pid in file.read().split()]
        if not family:
            return
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _remove_shared_files(begun: float) -> None:
    """Removes shared memory of MPICH's that is younger than the job and that is not in use: that of
    ranks which were killed before they could take its name away.
    """
    deadline = time.monotonic() + _USED_FOR_S
    while found := [name for name in glob.glob(_SHARED_FILES) if _is_ours(name, begun)]:
        used = _mapped()
        for name in found:
            if name not in used:
                with contextlib.suppress(OSError):
                    os.unlink(name)
        if time.monotonic() > deadline:
            return  # another job's, then
        time.sleep(0.1)


def _is_ours(name: str, begun: float) -> bool:
    try:
        about = os.stat(name)
    except OSError:
        return False
    return about.st_uid == os.geteuid() and about.st_ctime >= begun


def _mapped() -> str:
    maps = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            maps.append(file.read())
    return "".join(maps)


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
