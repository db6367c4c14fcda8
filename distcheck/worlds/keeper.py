"""A program that keeps another one, which may be any code. It has the standard library alone.

It starts that one, waits until it ends, or the front lets go or dies, and then ends everything that
it has started, detached or not: what loses its parent becomes a child of this process. Its own end
is that of the program.

Of an MPI launcher, it also removes the files that it left. A launcher cannot be trusted with that:
killed, it leaves its folder, and MPICH's ranks, killed, their shared memory. Open MPI's prterun
listens on all interfaces and has no option against it. The launcher therefore runs under a seccomp
filter that stops it at every listen(2); this process ties the socket to the loopback device first
and then lets the call go on (docs/decisions/mpi.md).
"""

import contextlib
import ctypes
import fcntl
import glob
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

# Of distcheck's own programs: no file of another's runs in them.
PYTHON = (sys.executable, "-I", "-S")

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 1.0  # with a launcher whose stand-ins have left
_SHARED_FILES = "/dev/shm/mpich_shm_*"
_USED_FOR_S = 5.0  # by ranks that are being killed at this moment

# linux/seccomp.h, linux/filter.h and linux/audit.h.
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_NEW_LISTENER = 8
_SECCOMP_RET_ALLOW = 0x7FFF0000
_SECCOMP_RET_USER_NOTIF = 0x7FC00000
_SECCOMP_USER_NOTIF_FLAG_CONTINUE = 1
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # id, pid, flags, number, architecture, ip, arguments
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PIDFD_GETFD = 438
_LOOPBACK = b"lo"
# What a kernel calls the machine, and the numbers of seccomp(2) and listen(2).
_CALLS = {"x86_64": (0xC000003E, 317, 50), "aarch64": (0xC00000B7, 277, 201)}


def start_kept(
    command: Sequence[str],
    control: socket.socket,
    *,
    env: Mapping[str, str],
    output: IO[bytes] | int,
    folder: str = "",
    cwd: "str | os.PathLike[str] | None" = None,
) -> "subprocess.Popen[bytes]":
    """The keeper, which ends when the other end of `control` is closed, or the command has ended.
    `folder` is that of an MPI launcher's files.
    """
    return subprocess.Popen(
        [*PYTHON, __file__, str(os.getpid()), str(control.fileno()), folder, *command],
        env=env,
        cwd=cwd,
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C is the front's to handle
    )


def keep(front_pid: int, control_fd: int, folder: str, command: list[str]) -> int:
    """Runs `command` until it ends, or `control_fd` or the process `front_pid` does; returns how it
    ended, as subprocess does. Of an MPI launcher, `folder` is that of its files.
    """
    control = socket.socket(fileno=control_fd)
    begun = time.time()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
            # What is ignored would be ignored by a script and by all that it starts, too.
            signal.signal(number, signal.SIG_IGN if folder else _leave_it_to_the_front)
        if folder:
            kept, listens = _start(command)
        else:
            kept, listens = subprocess.Popen(command, restore_signals=True), None
        with kept:
            _wait(front_pid, control, kept, listens)
            with contextlib.suppress(subprocess.TimeoutExpired):
                kept.wait(_PATIENCE_S)
            _end_children()
        return kept.returncode
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_shared_files(begun)


def _leave_it_to_the_front(number: int, frame: object) -> None:
    """A signal that a terminal or a cluster sends to every process."""


def _end_as(code: int) -> None:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _start(command: list[str]) -> "tuple[subprocess.Popen[bytes], int | None]":
    """The launcher, and where the kernel asks about its calls of listen(2).

    None where this kernel, machine or container permits no such filter: the launcher then listens
    where it likes.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def stop_at_listen() -> None:
            fd = _filter_listen()
            socket.send_fds(theirs, [b"."], [fd] if fd is not None else [])

        launcher = subprocess.Popen(command, restore_signals=True, preexec_fn=stop_at_listen)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    return launcher, fds[0] if fds else None


def _filter_listen() -> int | None:
    """Makes the kernel ask about each listen(2) of this process and of what it starts.

    The descriptor at which it asks; None where this is refused.
    """
    machine = os.uname().machine
    if machine not in _CALLS:
        return None
    architecture, seccomp, listen = _CALLS[machine]
    steps = [
        (_LOAD_WORD, 0, 0, 4),  # seccomp_data.arch
        (_JUMP_IF_EQUAL, 0, 2, architecture),
        (_LOAD_WORD, 0, 0, 0),  # seccomp_data.nr
        (_JUMP_IF_EQUAL, 1, 0, listen),
        (_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
        (_RETURN, 0, 0, _SECCOMP_RET_USER_NOTIF),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    system = ctypes.CDLL(None)
    if system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return None
    flags = _SECCOMP_FILTER_FLAG_NEW_LISTENER
    fd: int = system.syscall(seccomp, _SECCOMP_SET_MODE_FILTER, flags, program)
    return fd if fd >= 0 else None


def _wait(
    front_pid: int, control: socket.socket, launcher: "subprocess.Popen[bytes]", listens: int | None
) -> None:
    try:
        watched = [control.fileno(), os.pidfd_open(front_pid), os.pidfd_open(launcher.pid)]
    except OSError:
        return  # one of them is gone already
    asked = [listens] if listens is not None else []
    while select.select([*watched, *asked], [], [])[0] == asked:
        with contextlib.suppress(OSError):  # it died in the meantime
            _answer(asked[0])


def _answer(listens: int) -> None:
    """Ties the socket that is to listen to the loopback device, and lets the call go on."""
    question = bytearray(_NOTIFICATION.size)
    fcntl.ioctl(listens, _NOTIF_RECV, question)
    number, thread, _, _, _, _, fd, *_ = _NOTIFICATION.unpack(question)
    try:
        with contextlib.suppress(OSError):
            _tie_to_loopback(thread, fd)
    finally:
        answer = _ANSWER.pack(number, 0, 0, _SECCOMP_USER_NOTIF_FLAG_CONTINUE)
        fcntl.ioctl(listens, _NOTIF_SEND, answer)


def _tie_to_loopback(thread: int, fd: int) -> None:
    with open(f"/proc/{thread}/status") as file:
        process = next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
    with copy_of_socket(process, fd) as listening:
        if listening.family in (socket.AF_INET, socket.AF_INET6):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)


def copy_of_socket(process: int, fd: int) -> socket.socket:
    """The socket that another process of this user has as `fd`. Raises OSError."""
    pidfd = os.pidfd_open(process)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=copy)


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
    _end_as(keep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
