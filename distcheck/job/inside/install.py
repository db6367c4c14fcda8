"""Attaches the recorder or a replay to the hooks. A defect of distcheck never ends the job.

In every rank, a thread waits at a named pipe for status requests, so that a rank that hangs in a
collective can still report its position.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from distcheck import private
from distcheck.errors import ExitCode
from distcheck.errors.masking import masked
from distcheck.job import settings as asked
from distcheck.job.inside import hooks
from distcheck.job.inside.loaders import LoaderWorkerListener
from distcheck.job.inside.marking import SHARED_RANK, is_rank_process
from distcheck.job.inside.perturb import PerturbingRecorder
from distcheck.job.inside.rank import SharedRankError, rank_and_world_size
from distcheck.job.inside.recorder import Recorder
from distcheck.job.settings import RankPosition
from distcheck.worlds import flight

_EVERY_S = 0.1  # between two heartbeats


class StatusResponder:
    """Sends heartbeats and answers status requests, in a process that has imported torch."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self._folder, self._recorder = folder, recorder
        self._main = threading.get_ident()
        self._beats, self._last = 0, 0.0
        self._file = os.open(
            folder / f"heartbeat-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        with contextlib.suppress(OSError):  # without named pipes, a rank cannot be asked
            os.mkfifo(folder / f"ask-{os.getpid()}", 0o600)
            threading.Thread(target=self._answer, daemon=True).start()

    def heartbeat(self) -> None:
        """Write a heartbeat: the script made progress."""
        now = time.monotonic()
        if now - self._last >= _EVERY_S:
            self._last, self._beats = now, self._beats + 1
            os.pwrite(self._file, self._beats.to_bytes(8, "little"), 0)

    def _answer(self) -> None:
        """Reply to status requests until the folder is gone."""
        name = str(os.getpid())
        while True:
            try:
                with (self._folder / f"ask-{name}").open("rb") as asked:
                    asked.read()
                data = msgspec.json.encode(self._current_position())
                private.write(self._folder / f"answer-{name}", data)
            except OSError:
                return

    def _current_position(self) -> RankPosition:
        frame = sys._current_frames().get(self._main)
        own = str(Path(__file__).parents[1])
        stack = [line for line in traceback.format_stack(frame) if own not in line]
        rank, world = rank_and_world_size()
        return RankPosition(
            rank=rank, world=world, step=self._recorder.steps_over, stack="".join(stack[-12:]),
            collectives=flight.latest(),
        )  # fmt: skip


def _after_fork_in_child(folder: Path) -> None:
    """Detach a rank's forked child; data loader workers record their RNG streams."""
    if is_rank_process():
        hooks.set_listener(LoaderWorkerListener(folder, rank_and_world_size()[0]))
        hooks.heartbeat = lambda: None


def install(file: str) -> None:
    """Install the listener, once per process, after torch is imported."""
    settings = asked.read(Path(file))
    folder = Path(file).parent

    def give_up() -> None:
        error = sys.exception()
        with contextlib.suppress(OSError):  # the folder and its reader no longer exist
            if not isinstance(error, SharedRankError):
                private.write(folder / "defect", masked(traceback.format_exc()))
            elif os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                private.write(folder / SHARED_RANK, str(error))  # not restarted after a failure
        if settings.mode == "replay":
            os._exit(ExitCode.INTERNAL)

    try:
        _install(settings, folder, give_up)
    except Exception:  # the script continues after importing torch
        hooks.set_listener(None)
        give_up()


def _install(settings: asked.JobSettings, folder: Path, give_up: Callable[[], None]) -> None:
    if settings.on_cpu:
        from distcheck.job.inside import on_cpu

        on_cpu.install(settings.gpus)
    if settings.mode == "guard":
        from distcheck.job.inside.guarded import GuardedOptimizers

        GuardedOptimizers(settings, folder).install()
        return
    if settings.mode == "record":
        recorder = (PerturbingRecorder if settings.draw else Recorder)(settings, folder)
        hooks.install(recorder, give_up)
        hooks.heartbeat = StatusResponder(folder, recorder).heartbeat
        os.register_at_fork(after_in_child=lambda: _after_fork_in_child(folder))
        return
    from distcheck.job.inside import single_process_group
    from distcheck.job.inside.replayer import Replayer

    torch.set_num_threads(1)  # threads would be lost in the replay's forks
    torch.set_num_threads = lambda number: None  # type: ignore[assignment]
    single_process_group.install(forks=not settings.in_processes)
    if settings.spawns:
        single_process_group.run_first_rank(settings.spawns)
    hooks.install(Replayer(settings, folder), give_up)
