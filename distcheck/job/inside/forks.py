"""Copies of a replay that go on for a moment by themselves: each computes one set of gradients.

A copy is forked where a step begins. It is handed other batches or slightly other parameters,
trains on until the script is about to use the gradients, writes them down, and is gone.
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

_PATIENCE_S = 300.0  # for one copy: a forward and a backward pass of every micro-batch
_FAILED = 9
_MOST_SAID = 300  # characters of what a copy raised


Written = dict[ReplayTask, dict[str, torch.Tensor] | None]


class Forks:
    """Forks copies, at most as many at once as there are cores, and reads what they wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.why: dict[ReplayTask, str] = {}  # of copies that failed
        self._spare: tuple[int, int] | None = None  # its process, and a pipe that it waits at

    def _file(self, task: ReplayTask) -> Path:
        of = f"-{len(task.pairs)}-{task.pairs[0][0]}" if task.pairs else ""
        of += "-longer" if task.longer else "-doubles" if task.doubles else ""
        return self._folder / f"copy-{task.step}-{task.rank}-{task.draw}{of}.safetensors"

    def run(
        self, tasks: Sequence[ReplayTask], step: int, mode: str, *, reads: bool = True
    ) -> "ReplayTask | Written":
        """In the parent: what each copy wrote, None of one that failed; without `reads`, it is left
        to be read. In a copy, which knows step and mode: its role.
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
                    self._note(running.pop(child), status)
                elif time.monotonic() - begun[child] > _PATIENCE_S:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        return self.read(tasks) if reads else {}

    def read(self, tasks: Sequence[ReplayTask]) -> "Written":
        return {task: tensors.taken_from(self._file(task)) for task in tasks}

    def keep_spare(self) -> bool:
        """Forks a copy that waits; True in it, when it is asked to go on."""
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
        """Lets the spare copy go on, and waits until it has ended."""
        if self._spare is None:
            return False
        os.write(self._spare[1], b"1")
        self.end_spare()
        return True

    def end_spare(self) -> None:
        """Ends the spare copy, if it was not asked for anything."""
        if self._spare is not None:
            child, writes = self._spare
            self._spare = None
            os.close(writes)
            os.waitpid(child, 0)

    def _reasons(self, task: ReplayTask) -> Path:
        return self._file(task).with_suffix(".raised")

    def _note(self, task: ReplayTask, status: int) -> None:
        """Keeps why a copy failed: what it raised, or how it ended."""
        self.why.pop(task, None)
        code = os.waitstatus_to_exitcode(status)
        said = self._reasons(task)
        if said.exists():
            self.why[task] = said.read_text(errors="backslashreplace")[:_MOST_SAID]
            said.unlink()
        elif code:
            self.why[task] = how_ended(code)

    def leave(self, task: ReplayTask, found: dict[str, torch.Tensor], step: int) -> None:
        """In a copy: writes what it has computed, and ends it."""
        tensors.write(found, self._file(task))
        os._exit(0)


def how_ended(code: int) -> str:
    """How a copy ended that said nothing, in words."""
    return f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"


def _become_a_copy(reasons: Path) -> None:
    """What the script prints is printed by the parent; what it raises ends the copy, and is noted
    for the parent.
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
