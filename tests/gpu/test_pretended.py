"""The code for GPUs, run on one that is pretended; and that the pretense refuses what it should."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from distcheck.machine import devices
from tests.world.command import BAD, COMMAND, QUICK, ROOT

pytestmark = pytest.mark.skipif(devices.gpu_count() > 0, reason="this machine has a GPU")
CUDA = ("--device", "cuda", "--json", "r.json")
SITE = Path(__file__).parent / "site"

MORE = """
import numpy, torch
import torch.distributed as dist

def mixes(model, step):
    for p in model.parameters():
        p.grad += torch.ones(p.shape)

def refused(model, step):
    there = next(model.parameters()).detach()
    attempts = {
        "mixed": lambda: there + torch.ones(there.shape),
        "numpy": there.numpy,
        "address": there.data_ptr,
        "generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
        "send": lambda: dist.isend(there, 1 - step.rank),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError(f"{name} was not refused")
    raise SystemExit("all were refused")

def average_array(array: numpy.ndarray) -> numpy.ndarray:
    total = torch.from_numpy(array).clone()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).numpy()
"""


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "more.py").write_text(MORE)
    path = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [*COMMAND, "verify", *words, *CUDA], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}, timeout=400,
    )  # fmt: skip


DEFAULT = [
    "exact-float32-cuda", "cnn-float32-cuda", "composite-float32-cuda",
    "composite-float64-cuda", "cnn-float32-cuda-against-cpu",
]  # fmt: skip


@pytest.mark.parametrize(
    ("workload", "cases"),
    [
        (["cnn"], ["cnn-float32-cuda", "cnn-float64-cuda", "cnn-float32-cuda-against-cpu"]),
        pytest.param([], DEFAULT, marks=pytest.mark.sweep),
    ],
    ids=["cnn", "default"],
)
def test_all_of_a_verification(tmp_path: Path, workload: list[str], cases: list[str]) -> None:
    """Ranks, traces, judges of every layer, rerun, and the whole batch on the CPU."""
    words = ["--world", "2", "--steps", "2", *(f"--workload={name}" for name in workload)]
    ran = run(tmp_path, "--strategy", "allreduce", *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["environment"]["gpu"] == "pretended"
    assert report["environment"]["tf32"] is False
    assert {case["case"]["device"] for case in report["cases"]} == {"cuda"}
    # composite draws random numbers, which are others on the CPU: it is not held against it.
    assert [case["case"]["id"] for case in report["cases"]] == [
        f"allreduce-w2-{case}" for case in cases
    ]


@pytest.mark.sweep
def test_strategies(tmp_path: Path) -> None:
    """By root and leaves, from neighbor to neighbor, with a divided optimizer, through arrays."""
    names = ("gather_scatter", "ring", "zero1", "more.py:average_array")
    strategies = [word for name in names for word in ("--strategy", name)]
    quick = ("--workload", "mlp", "--dtype", "float32", "--steps", "2", "--batch", "255")
    ran = run(tmp_path, *strategies, "--world", "3", *quick)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cases = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert [case["verdict"] for case in cases] == ["pass"] * 8


@pytest.mark.sweep
def test_a_wrong_gradient_is_seen_and_explained(tmp_path: Path) -> None:
    ran = run(tmp_path, "--strategy", "bad.py:no_sync", *QUICK)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "ranks, cuda: missing-sync" in ran.stdout


def test_the_pretense_refuses_what_a_gpu_does(tmp_path: Path) -> None:
    """In an expression, and everywhere else."""
    ran = run(tmp_path, "--strategy", "more.py:mixes", "--strategy", "more.py:refused", *QUICK)
    assert ran.returncode == 4, ran.stdout + ran.stderr
    mixes, refused = ran.stdout.split("more.py:refused", 1)
    assert "Expected all tensors to be on the same device" in mixes
    assert "all were refused" in refused
