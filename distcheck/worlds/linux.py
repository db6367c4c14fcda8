"""The few Linux calls that Python does not wrap: prctl, where names come from, reading /proc."""

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Threads that wake by the clock, whether there is anything to do or not, by the names that the
# kernel has for them: gloo's, which looks for messages a hundred times a second, and our own. On a
# crowded machine they wait for a core most of the time, also in a rank that will never go on.
LOOK_THREAD = "distcheck look"
_BY_THE_CLOCK = (LOOK_THREAD.encode(), b"gloo_tcp_loop")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; ends at once if it already has.

    The kernel means the parent *thread* (prctl(2)), so the parent must be single-threaded.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes processes whose parents die children of this one, so that they can be ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """Makes the C library know host names from /etc/hosts alone, and then as it was configured.

    torch asks for the name of each address that it connects to, and ::ffff:127.0.0.1, as which it
    sees loopback, stands in no /etc/hosts: a name server is asked, and where none answers, or one
    drops a question, the rank waits five seconds or more. Measured: one such look-up takes 20 ms
    with a name server that answers at once, and 0.05 ms without.

    The function is an internal one of glibc; without it, names are looked up as configured.
    """
    look_up = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # glibc's
    if look_up is None:
        yield
        return
    look_up(b"hosts", b"files")
    try:
        yield
    finally:
        look_up(b"hosts", _configured_sources().encode())


def _configured_sources() -> str:
    """The line `hosts:` of nsswitch.conf(5), or what glibc takes without one."""
    with contextlib.suppress(OSError):
        found = re.search(r"^\s*hosts:([^#\n]*)", Path("/etc/nsswitch.conf").read_text(), re.M)
        if found:
            return found[1].strip()
    return "files dns"


def children_of_self() -> list[int]:
    """The process ids of this process's children; empty where the kernel does not tell."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [int(pid) for pid in path.read_text().split()]
    except OSError:
        return []


def name_of(pid: int) -> str:
    """The command line of a process, or its short name while it is starting; empty where it has
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
    """Gives the calling thread the name that the kernel has for it, of 15 bytes at most."""
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


def ran_ns(pid: int) -> int:
    """How long the main thread of a process has run, in nanoseconds; 0 once it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    return 0


def is_awake(pid: int, *, main_by_the_clock: bool = False) -> bool:
    """Whether a thread of a process runs or would run if it had a core (state R), or the kernel is
    fetching something for it: a page, a file (state D). Threads that wake by the clock do not
    count, of which the main one may be one.

    While it waits for a core, or another process has the core itself, `busy_seconds` stands still:
    the kernel adds what was waited for when it is over.
    """
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/task") as tasks:  # it is gone
        for task in tasks:
            with contextlib.suppress(OSError):  # this thread is
                stat = Path(task.path, "stat").read_bytes()  # a name may be cut within a character
                before, _, after = stat.rpartition(b")")
                by_the_clock = before.partition(b"(")[2] in _BY_THE_CLOCK or (
                    main_by_the_clock and task.name == str(pid)
                )
                if after.split()[:1] in ([b"R"], [b"D"]) and not by_the_clock:
                    return True
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as SIGSTOP does (state T); not by a debugger (state t)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"T"]
    return False


def busy_seconds(pid: int, *, main_by_the_clock: bool = False) -> float:
    """Seconds for which the threads of a process ran or waited for a core; 0.0 once it is gone.

    A rank that waits for a peer gathers nothing here, one that computes on a crowded machine
    does (/proc/PID/task/TID/schedstat: time on a core, time on a run queue, in nanoseconds). What
    threads that wake by the clock wait for is left out: it says how crowded the machine is.
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
