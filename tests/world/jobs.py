"""Small jobs for ranks; named by "tests.world.jobs:NAME"."""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from distcheck.worlds import scratch
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import Rendezvous, join


class Asked(msgspec.Struct):
    """Where to meet, and anything the job wants to know."""

    rendezvous: Rendezvous
    about: dict


def _join(payload: bytes, fds: Descriptors) -> tuple[int, dict]:
    job = msgspec.msgpack.decode(payload, type=Asked)
    join(job.rendezvous, fds[STORE])
    return job.rendezvous.rank, job.about


def everything_fine(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, _ = _join(payload, fds)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    facts = {
        "sum": float(total), "threads": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")},
        "ifname": os.environ.get("GLOO_SOCKET_IFNAME"), "parent": os.getppid(),
        "torch_random": float(torch.rand(())),
    }  # fmt: skip
    return msgspec.msgpack.encode(facts)


def imports(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Which of the modules it inherited; then it imports them all."""
    names = msgspec.msgpack.decode(payload, type=list[str])
    there = [name for name in names if name in sys.modules]
    for name in names:
        importlib.import_module(name)
    return msgspec.msgpack.encode(there)


def raises(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, about = _join(payload, fds)
    reporter.progress(1, "sync")
    store = dist.distributed_c10d._get_default_store()
    if rank == about["culprit"]:
        store.wait([f"{peer} is there" for peer in range(dist.get_world_size()) if peer != rank])
        raise ValueError("rank's own error")
    store.set(f"{rank} is there", "")
    dist.all_reduce(torch.ones(1))
    return b""


def raises_late(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, about = _join(payload, fds)
    end = time.monotonic() + 1.5
    while rank != about["culprit"] and time.monotonic() < end:
        pass
    raise ValueError(f"rank {rank}'s own error")


def exits(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, about = _join(payload, fds)
    if rank == about["culprit"]:
        os._exit(about["code"])
    dist.all_reduce(torch.ones(1))
    return b""


def killed(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, about = _join(payload, fds)
    if rank == about["culprit"]:
        if about["signal"] == signal.SIGSEGV:
            ctypes.string_at(0)
        os.kill(os.getpid(), about["signal"])
    dist.all_reduce(torch.ones(1))
    return b""


def hangs(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, about = _join(payload, fds)
    reporter.progress(2, "sync")
    if rank == about["culprit"]:
        time.sleep(1000)
    dist.all_reduce(torch.ones(5))
    return b""


def holds_the_lock(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Rank 1 stays in C with the interpreter's lock, so that none of its Python can run."""
    rank, _ = _join(payload, fds)
    reporter.progress(2, "sync")
    if rank == 1:
        lock = ctypes.create_string_buffer(64)  # zeros: a mutex that nobody holds
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
        ctypes.PyDLL(None).pthread_mutex_lock(lock)  # for ever, and through every signal
    dist.barrier()
    return b""


def wakes_when_shaken(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Rank 1 holds the lock as above, in a call that the signal it is asked with cuts short."""
    rank, _ = _join(payload, fds)
    reporter.progress(2, "sync")
    if rank == 1:
        ctypes.PyDLL(None).sleep(1000)
    return b""


def works_hard(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Busy for longer than the deadline, without a sign of progress once it has begun."""
    _join(payload, fds)
    reporter.progress(1, "works")
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        torch.rand(100, 100) @ torch.rand(100, 100)
    return b""


def leaves_a_grandchild(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Starts a process in a session of its own, which no process group reaches."""
    rank, _ = _join(payload, fds)
    if rank == 1:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True
        )
        reporter.say(str(child.pid).encode())
        raise RuntimeError("the grandchild is left behind")
    return b""


def leaves_a_chain(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Processes within processes: each becomes an orphan when the one above it is ended."""
    rank, about = _join(payload, fds)
    if rank == 1:
        sleep = f"sleep {about['seconds']}"
        subprocess.Popen(
            ["sh", "-c", f"sh -c 'sh -c \"{sleep}; true\"; true'; true"], start_new_session=True
        )
        time.sleep(1000 if about["stays"] else 0.3)
    return b""


def leaves_early(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Rank 1 returns as if all were well, and is gone when the front has heard of that; rank 0
    is done when the front has noticed.
    """
    rank, about = _join(payload, fds)
    heard, noticed = Path(about["heard"]), Path(about["noticed"])
    dist.barrier()
    if rank == 1:
        threading.Thread(target=lambda: (_wait_for(heard), os._exit(0)), daemon=True).start()
    else:
        _wait_for(noticed)
    return b""


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def chatters(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    rank, _ = _join(payload, fds)
    for line in range(50_000):
        print("rank", rank, "line", line)
    if rank == 1:
        raise RuntimeError("after much talk")
    return b""


def sleeps_with_folders(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    with scratch.folder() as one, scratch.folder(Path(os.fsdecode(payload)), ".mine-") as two:
        for made in (one, two):
            (made / "within").mkdir()
            (made / "within" / "file").write_text("")
        return sleeps_alone(payload, fds, reporter)


def sleeps_alone(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    reporter.progress(0, "asleep")
    time.sleep(1000)
    return b""
