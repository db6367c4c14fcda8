"""Lets the recorder or a replay listen to the hooks; a defect of distcheck never ends the job."""

import contextlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from distcheck import private
from distcheck.errors import ExitCode
from distcheck.errors.masking import masked
from distcheck.job import settings as asked
from distcheck.job.inside import hooks
from distcheck.job.inside.answering import Answering
from distcheck.job.inside.loaders import InWorker
from distcheck.job.inside.marking import is_of_a_rank
from distcheck.job.inside.moving import Moving
from distcheck.job.inside.rank import world_of
from distcheck.job.inside.recorder import Recorder


def _in_child(folder: Path) -> None:
    """What a rank forks is not a rank; its data loaders' processes note what they draw from."""
    if is_of_a_rank():
        hooks.listen(InWorker(folder, world_of()[0]))
        hooks.beat = lambda: None


def install(file: str) -> None:
    """Called once in a process, when torch has been imported."""
    settings = asked.read(Path(file))
    folder = Path(file).parent

    def give_up() -> None:
        with contextlib.suppress(OSError):  # the folder is gone: its reader is, too
            private.write(folder / "defect", masked(traceback.format_exc()))
        if settings.mode == "replay":
            os._exit(ExitCode.INTERNAL)

    try:
        _install(settings, folder, give_up)
    except Exception:  # the script imports torch, and goes on with it
        hooks.listen(None)
        give_up()


def _install(settings: asked.JobSettings, folder: Path, give_up: Callable[[], None]) -> None:
    if settings.on_cpu:
        from distcheck.job.inside import on_cpu

        on_cpu.install(settings.gpus)
    if settings.mode == "guard":
        from distcheck.job.inside.guarded import Guarded

        Guarded(settings, folder).install()
        return
    if settings.mode == "record":
        recorder = (Moving if settings.draw else Recorder)(settings, folder)
        hooks.install(recorder, give_up)
        hooks.beat = Answering(folder, lambda: recorder.steps_over).beat
        os.register_at_fork(after_in_child=lambda: _in_child(folder))
        return
    from distcheck.job.inside import alone
    from distcheck.job.inside.replayer import Replayer

    torch.set_num_threads(1)  # threads would be lost where the replay forks
    torch.set_num_threads = lambda number: None  # type: ignore[assignment]
    alone.install(forks=not settings.in_processes)
    if settings.spawns:
        alone.run_first_rank(settings.spawns)
    hooks.install(Replayer(settings, folder), give_up)
