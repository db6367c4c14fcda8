"""Linux calls that Python does not wrap: prctl, host name lookup, and reading /proc."""

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Periodic threads, by their kernel names: gloo's, which polls for messages a hundred times a
# second, and distcheck's. On an overloaded machine they wait for a core most of the time, also in a
# rank that is deadlocked.
LOOK_THREAD = "distcheck look"
_BY_THE_CLOCK = (LOOK_THREAD.encode(), b"gloo_tcp_loop")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends. Exit at once if the parent has
    already ended.

    The kernel tracks the parent *thread* (prctl(2)), so the parent must be single-threaded.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that they can be ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """Make the C library resolve host names from /etc/hosts only; restore its configuration after
    the block.

    torch looks up the name of each address that it connects to. The loopback address appears as
    ::ffff:127.0.0.1, which is not in /etc/hosts, so the C library queries a name server. If the
    server does not answer, the rank blocks for five seconds or more. Measured: one lookup takes 20
    ms with a name server that answers at once, and 0.05 ms without.

    This uses an internal function of glibc. If that is missing, names are resolved as configured.
    """
    look_up = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # glibc only
    if look_up is None:
        yield
        return
    look_up(b"hosts", b"files")
    try:
        yield
    finally:
        look_up(b"hosts", _configured_sources().encode())


def _configured_sources() -> str:
    """Return the line `hosts:` of nsswitch.conf(5), or glibc's default."""
    with contextlib.suppress(OSError):
        found = re.search(r"^\s*hosts:([^#\n]*)", Path("/etc/nsswitch.conf").read_text(), re.M)
        if found:
            return found[1].strip()
    return "files dns"


def children_of_self() -> list[int]:
    """Return the process ids of this process's children; empty if the kernel hides them."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [int(pid) for pid in path.read_text().split()]
    except OSError:
        return []


def process_name(pid: int) -> str:
    """Return the command line of a process, or its short name while it is starting; empty if it has
    ended.
    """
    with contextlib.suppress(OSError):
        short, _, rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        if rest.split()[:1] == [b"Z"]:
            return ""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0")
        name = words.replace(b"\0", b" ") or short.partition(b"(")[2]
        return name.decode(errors="replace")
    return ""


def name_thread(name: str) -> None:
    """Set the kernel's name of the calling thread, at most 15 bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


def main_thread_run_ns(pid: int) -> int:
    """Return the run time of a process's main thread in nanoseconds; 0 if the process has gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    return 0


def is_awake(pid: int, *, main_by_the_clock: bool = False) -> bool:
    """Return True if a thread of the process runs or is runnable (state R), or is in
    uninterruptible sleep (state D: page or file I/O). Threads that only wake up periodically are
    ignored; with `main_by_the_clock`, the main thread is one of them.

    While a thread waits for a core, `busy_seconds` does not advance: the kernel adds the waiting
    time when the wait ends.
    """
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/task") as tasks:  # it is gone
        for task in tasks:
            with contextlib.suppress(OSError):  # the thread has exited
                stat = Path(task.path, "stat").read_bytes()  # may be cut within a character
                before, _, after = stat.rpartition(b")")
                by_the_clock = before.partition(b"(")[2] in _BY_THE_CLOCK or (
                    main_by_the_clock and task.name == str(pid)
                )
                if after.split()[:1] in ([b"R"], [b"D"]) and not by_the_clock:
                    return True
    return False


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped the process (state T). A debugger's stop (state t) does
    not count.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"T"]
    return False


def busy_seconds(pid: int, *, main_by_the_clock: bool = False) -> float:
    """Return for how many seconds the threads of a process ran or waited for a core; 0.0 if the
    process has gone.

    Computing threads accumulate this time even on an overloaded machine; a rank that is blocked on
    a peer does not (/proc/PID/task/TID/schedstat: time on a core and time in a run queue, in
    nanoseconds). The queue time of periodic threads is excluded, because it only measures the load
    of the machine.
    """
    total = 0
    with contextlib.suppress(OSError, ValueError), os.scandir(f"/proc/{pid}/task") as tasks:
        for task in tasks:
            ran, waited, _ = Path(task.path, "schedstat").read_text().split()
            total += int(ran)
            if main_by_the_clock and task.name == str(pid):
                continue
            if Path(task.path, "comm").read_bytes().rstrip() not in _BY_THE_CLOCK:
                total += int(waited)
    return total / 1e9
