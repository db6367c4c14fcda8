"""Small training loops that a recorder hears, as the only rank: each in a fork of this process,
which has torch already.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # which the first optimizer would import, in each fork

from distcheck.job.inside import hooks
from distcheck.job.inside.perturb import PerturbingRecorder
from distcheck.job.inside.recorder import Recorder
from distcheck.job.settings import JobSettings
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import JobRecording
from tests.launchers.processes import free_port

HEAD = """
import sys, torch
import torch.nn.functional as F

torch.manual_seed(0)

def batch(number, rows=4):
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(rows, 3, generator=drawn), torch.randint(0, 2, (rows,), generator=drawn)

def optimizer_of(*models):
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
"""


def run(
    script: str, folder: Path, *, steps: int = 3, watched: bool = True, defect: bool = False,
    modules: bool = False,
) -> str:  # fmt: skip
    """What a script printed, its steps recorded into the folder if it is watched; `defect`: the
    recorder is to fail.
    """
    asked = JobSettings(steps=steps, keep_going=True, modules=modules)
    settings = asked if watched else None
    return _forked(HEAD + script, folder, settings, defect=defect)


def _forked(
    script: str, folder: Path, settings: JobSettings | None, *, defect: bool = False,
    arguments: Sequence[str] = (), there: Path | None = None,
) -> str:  # fmt: skip
    printed, raised = folder / f"printed-{settings is not None}", folder / "raised"
    child = os.fork()
    if child == 0:
        code = 1
        gc.freeze()  # what this process holds may wait for threads that are not in a fork
        try:
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 1)
            os.chdir(there or Path.cwd())
            sys.argv = ["train.py", *arguments]
            _run(script, folder, settings)
            code = 0
        except BaseException:
            raised.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, raised.read_text() if raised.exists() else f"it ended with {status}"
    said = folder / "defect"
    assert said.exists() == defect, said.read_text() if said.exists() else "no defect was noted"
    return printed.read_text()


def _run(script: str, folder: Path, settings: JobSettings | None) -> None:
    sys.stdout = os.fdopen(1, "w")
    torch.set_num_threads(1)  # threads of this process are not in a fork
    if settings is not None:
        recorder = (PerturbingRecorder if settings.draw else Recorder)(settings, folder)
        defect = folder / "defect"
        hooks.install(recorder, lambda: defect.write_text(traceback.format_exc()) and None)
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def recorded_file(
    script: str, folder: Path, there: Path, *arguments: str, steps: int = 8, draw: int = 0
) -> JobRecording:
    """The recording of a whole script as the only rank, as one that is kept; it runs `there`."""
    for made in (folder, there):
        made.mkdir(parents=True, exist_ok=True)
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    settings = JobSettings(steps=steps, kept=True, draw=draw, keep_going=True)
    with patch.dict(os.environ, own):
        _forked(script, folder, settings, arguments=arguments, there=there)
    return reading.read_recording(folder)


def recorded(script: str, folder: Path, **about: Any) -> JobRecording:
    run(script, folder, **about)
    return reading.read_recording(folder)


def both(script: str, folder: Path, **about: Any) -> tuple[Any, Any]:
    """What a script prints as JSON without being watched, and watched."""
    alone = json.loads(run(script, folder, watched=False, **about))
    return alone, json.loads(run(script, folder, **about))
