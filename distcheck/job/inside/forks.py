"""Forked copies of a replay, each of which computes one set of gradients.

A copy is forked at the start of a step. It receives other batches or perturbed parameters, trains
until the script is about to use the gradients, writes them, and exits.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distcheck import private
from distcheck.errors.masking import masked
from distcheck.job.inside import tensors
from distcheck.job.settings import ReplayTask
from distcheck.machine.resources import cores
from distcheck.worlds import linux

_PATIENCE_S = 300.0  # for one copy: forward and backward of every micro-batch
_FAILED = 9
_MOST_SAID = 300  # characters of an exception that are kept


Written = dict[ReplayTask, dict[str, torch.Tensor] | None]


class Forks:
    """Forks copies, at most one per core at once, and reads their results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.why: dict[ReplayTask, str] = {}  # reasons of failed copies
        self._spare: tuple[int, int] | None = None  # its process, and the pipe that it waits at

    def _file(self, task: ReplayTask) -> Path:
        of = f"-{len(task.pairs)}-{task.pairs[0][0]}" if task.pairs else ""
        of += "-longer" if task.longer else "-doubles" if task.doubles else ""
        return self._folder / f"copy-{task.step}-{task.rank}-{task.draw}{of}.safetensors"

    def run(
        self, tasks: Sequence[ReplayTask], step: int, mode: str, *, reads: bool = True
    ) -> "ReplayTask | Written":
        """Fork the copies. In the parent, return their results (None for failed ones); in a copy,
        return its role.
        """
        waiting, running = list(tasks), dict[int, ReplayTask]()
        begun: dict[int, float] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        while waiting or running:
            if waiting and len(running) < cores():
                task = waiting.pop(0)
                child = os.fork()
                if child == 0:
                    linux.die_with_parent(parent)
                    _become_a_copy(self._reasons(task))
                    return task
                running[child], begun[child] = task, time.monotonic()
                continue
            for child in list(running):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    self._note_failure(running.pop(child), status)
                elif time.monotonic() - begun[child] > _PATIENCE_S:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        return self.read(tasks) if reads else {}

    def read(self, tasks: Sequence[ReplayTask]) -> "Written":
        return {task: tensors.pop_tensors(self._file(task)) for task in tasks}

    def keep_spare(self) -> bool:
        """Fork a spare copy that waits. Return True in that copy when it is released."""
        reads, writes = os.pipe()
        parent, child = os.getpid(), os.fork()
        if child == 0:
            linux.die_with_parent(parent)
            os.close(writes)
            if os.read(reads, 1):
                return True
            os._exit(0)
        os.close(reads)
        self._spare = child, writes
        return False

    def release_spare(self) -> bool:
        """Release the spare copy, and wait until it has exited."""
        if self._spare is None:
            return False
        os.write(self._spare[1], b"1")
        self.end_spare()
        return True

    def end_spare(self) -> None:
        """End the spare copy if it was not released."""
        if self._spare is not None:
            child, writes = self._spare
            self._spare = None
            os.close(writes)
            os.waitpid(child, 0)

    def _reasons(self, task: ReplayTask) -> Path:
        return self._file(task).with_suffix(".raised")

    def _note_failure(self, task: ReplayTask, status: int) -> None:
        """Record why a copy failed: its exception, or its exit status."""
        self.why.pop(task, None)
        code = os.waitstatus_to_exitcode(status)
        said = self._reasons(task)
        if said.exists():
            self.why[task] = said.read_text(errors="backslashreplace")[:_MOST_SAID]
            said.unlink()
        elif code:
            self.why[task] = exit_description(code)

    def leave(self, task: ReplayTask, found: dict[str, torch.Tensor], step: int) -> None:
        """Write the results of this copy and exit."""
        tensors.write(found, self._file(task))
        os._exit(0)


def exit_description(code: int) -> str:
    """Describe the exit of a copy that reported no exception."""
    return f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"


def _become_a_copy(reasons: Path) -> None:
    """Silence the output of this copy, because the parent prints it. An exception is reported, and
    the copy exits.
    """
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)

    def leave(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        first = str(error).strip().partition("\n")[0]
        with contextlib.suppress(OSError):
            private.write(reasons, masked(f"{kind.__name__}: {first}"))
        os._exit(_FAILED)

    sys.excepthook = leave
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
