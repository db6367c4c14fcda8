"""Process supervisor: runs an arbitrary command, and kills everything that the command started when
it exits or the front end dies. Imports only the standard library.

Orphaned descendants, detached or not, become children of the supervisor, which kills them as well.
The supervisor exits with the command's exit status.

For an MPI launcher, the supervisor also removes leftover files: a killed launcher leaves its folder
behind, and killed MPICH ranks leave their shared memory. Open MPI's prterun listens on all network
interfaces and has no option to prevent this. The launcher therefore runs under a seccomp filter
that stops it at every listen(2). The supervisor binds the socket to the loopback device, and then
lets the call continue (docs/decisions/mpi.md).
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

# For distcheck's own programs: isolated, so that no site or user file runs in them.
PYTHON = (sys.executable, "-I", "-S")

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 1.0  # for a launcher whose proxies have exited
_SHARED_FILES = "/dev/shm/mpich_shm_*"
_USED_FOR_S = 5.0  # grace period for ranks that are being killed at this moment

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
# The audit architecture of a machine, and the numbers of seccomp(2) and listen(2).
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
    """Start the supervisor. It ends when the command ends, or when the other end of `control` is
    closed. `folder` holds an MPI launcher's files; it is empty for any other command.
    """
    return subprocess.Popen(
        [*PYTHON, __file__, str(os.getpid()), str(control.fileno()), folder, *command],
        env=env,
        cwd=cwd,
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # the front end handles Ctrl-C
    )


def keep(front_pid: int, control_fd: int, folder: str, command: list[str]) -> int:
    """Run `command` until it ends, `control_fd` is closed, or the process `front_pid` exits. Return
    the exit code in the format of `subprocess`. `folder` holds an MPI launcher's files.
    """
    control = socket.socket(fileno=control_fd)
    begun = time.time()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
            # An ignored signal would also be ignored by a script and everything it starts.
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
    """Ignore a signal that a terminal or a cluster sends to all processes. The front end reacts to
    it.
    """


def _end_as(code: int) -> None:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _start(command: list[str]) -> "tuple[subprocess.Popen[bytes], int | None]":
    """Start the launcher. Return its process, and the descriptor on which the kernel reports its
    listen(2) calls.

    The descriptor is None if the kernel, machine or container does not permit the filter. The
    launcher then listens on all interfaces.
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
    """Make the kernel report each listen(2) call of this process and its descendants. Return the
    descriptor of the reports; None if the kernel refuses the filter.
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
        return  # one of the processes has already exited
    asked = [listens] if listens is not None else []
    while select.select([*watched, *asked], [], [])[0] == asked:
        with contextlib.suppress(OSError):  # it died in the meantime
            _answer(asked[0])


def _answer(listens: int) -> None:
    """Bind the socket of a reported listen(2) call to the loopback device, and let the call
    continue.
    """
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
    """Return a duplicate of the socket `fd` of another process of this user. Raises OSError."""
    pidfd = os.pidfd_open(process)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=copy)


def _end_children() -> None:
    """Kill children, including adopted orphans, until none is left."""
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
    """Remove shared memory of MPICH that is newer than the job and that no process has mapped.
    Ranks that were killed before they could unlink it have left it behind.
    """
    deadline = time.monotonic() + _USED_FOR_S
    while found := [name for name in glob.glob(_SHARED_FILES) if _is_ours(name, begun)]:
        used = _mapped()
        for name in found:
            if name not in used:
                with contextlib.suppress(OSError):
                    os.unlink(name)
        if time.monotonic() > deadline:
            return  # it belongs to another job
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
