"""The console script, run in a folder of its own beside some bad strategies."""

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]
PROGRESS = "progress: "  # begins the lines that a run writes of itself where there is no terminal
SCRIPT = Path(sysconfig.get_path("scripts"), "distcheck")
COMMAND = [sys.executable, *([str(SCRIPT)] if SCRIPT.exists() else ["-m", "distcheck"])]
# Without separate interpreters, which cost seconds a run and have tests of their own.
QUICK = ("--workload", "mlp:small", "--dtype", "float32", "--world", "2", "--no-separate")
SURE = (*QUICK, "--as", "model")  # where code fails, no other form is tried


def complaints(stderr: str) -> list[str]:
    """Lines of standard error that are not about progress."""
    return [line for line in stderr.splitlines() if line and not line.startswith(PROGRESS)]


BAD = """
import os, time
import torch.distributed as dist

def good(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

def no_sync(model):
    pass

def crash(model, step):
    if step.rank == 1:
        raise RuntimeError("the reason")
    good(model)

class doubled_on_the_way:
    def wrap(self, model):  # the same values, with twice the derivative
        model.register_forward_hook(lambda m, inputs, output: output * 2 - output.detach())
        return model

    def sync(self, model, step):
        good(model)
        for p in model.parameters():
            p.grad /= 2

def loses_its_folder(model, step):
    import shutil
    good(model)
    shutil.rmtree(".distcheck", ignore_errors=True)

def hang(model, step):
    if step.rank == 1 and step.index == 1:
        open("asleep", "w").close()
        time.sleep(1000)
    good(model)
"""

FILLER = """
import torch.distributed as dist

def fills_the_disk(model, step):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= step.world_size
    if step.index == 2 and step.rank == 0:
        with open("small/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
"""

MOODY = """
import os, pathlib, torch
from distcheck.workloads.mlp import MLP

class Moody(MLP):
    def loss(self, model, batch):
        marker = pathlib.Path("inspected")
        if "RANK" not in os.environ and marker.exists():
            raise RuntimeError("not in the mood")
        marker.touch()
        return super().loss(model, batch)
"""


def hear_interrupts() -> None:
    """Between fork and exec: whoever started the tests may have had SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def distcheck(tmp_path: Path) -> Run:
    """Runs the console script in a folder that holds bad.py and nothing else."""
    (tmp_path / "bad.py").write_text(BAD)

    def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "100", **options.pop("env", {})}  # type: ignore[dict-item]
        return subprocess.run(
            [*COMMAND, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            **options,  # type: ignore[call-overload]
        )

    return run
