"""A whole job on a GPU that is pretended, and a replay whose copies are processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distcheck.machine import devices
from tests.launchers.processes import free_port
from tests.world.command import ROOT

pytestmark = pytest.mark.skipif(devices.gpu_count() > 0, reason="this machine has a GPU")

# The command itself, where torch finds no GPU to describe.
FRONT = """
import sys
from distcheck.job import replaying
from distcheck.machine import devices
devices.describe = lambda device: {}
if sys.argv[1] == "in processes":
    replaying._is_lost_in_a_fork = lambda device: True
sys.argv[1:2] = ["job"]
from distcheck.cli import main
main()
"""

# DistributedDataParallel decides in C++ by the device, which the pretense does not reach.
SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tests.gpu.pretended import pretend

pretend()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)).to("cuda")
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
drawn = torch.Generator().manual_seed(rank + 1)
for step in range(6):
    inputs, labels = torch.randn(8, 12, generator=drawn), torch.randint(0, 4, (8,), generator=drawn)
    loss = F.cross_entropy(model(inputs.cuda()), labels.cuda())
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
"""
BY_RANK = (
    "each rank's batches separately, and the mean of their gradients, since on a GPU the kernel"
)


def judge(folder: Path, how: str, text: str, steps: str = "3") -> dict[str, Any]:
    (folder / "front.py").write_text(FRONT)
    (folder / "train.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "front.py", how, "--steps", steps, "--json", "r.json", "--",
         sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", str(free_port()), "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (folder / "r.json").exists(), ran.stdout + ran.stderr
    case: dict[str, Any] = json.loads((folder / "r.json").read_text())["cases"][0]
    return case


@pytest.mark.parametrize(
    ("find", "put", "steps", "failed"),
    [
        pytest.param("world\n", "world\n", 3, set(), marks=pytest.mark.sweep),
        pytest.param("/= world\n", "/= world * world\n", 1,
            {"gradients rounding", "gradients full batch float32"}, marks=pytest.mark.sweep),
    ],
    ids=["right", "divided twice"],
)  # fmt: skip
def test_job_is_compared(tmp_path: Path, find: str, put: str, steps: int, failed: set[str]) -> None:
    case = judge(tmp_path, "on a GPU", SCRIPT.replace(find, put), str(steps))
    assert case["case"]["device"] == "cuda"
    assert any(
        BY_RANK in note and f"covers {steps} of {steps} step" in note for note in case["notes"]
    )
    checks = {f"{c['check']} {c['layer']}": c for c in case["checks"]}
    assert {name for name, check in checks.items() if check["verdict"] == "fail"} == failed
    assert {check["verdict"] for check in checks.values()} <= {"pass", "fail"}
    # Forward, with the masks of the rank, and backward are those of the job, to the bit.
    assert checks["loss full batch float32"]["worst"]["error"] == 0.0
    causes = [found["cause"] for found in case["diagnosis"]]
    assert causes == (["double-division"] if failed else [])


@pytest.mark.sweep
@pytest.mark.parametrize("example", ["amp", "by_hand", "nanogpt_like", "plain_ddp", "zero"])
def test_examples_with_copies_that_are_processes(tmp_path: Path, example: str) -> None:
    text = (ROOT / "examples" / "jobs" / f"{example}.py").read_text()
    case = judge(tmp_path, "in processes", text)
    assert case["verdict"] == "pass", case


@pytest.mark.sweep
def test_a_copy_that_fails_says_why(tmp_path: Path) -> None:
    """The process that starts the copies goes on; each copy fails in its first step."""
    text = SCRIPT.replace(
        "    loss.backward()", "    assert world > 1, 'alone'\n    loss.backward()"
    )
    case = judge(tmp_path, "on a GPU", text, "1")
    (reference,) = [c for c in case["checks"] if c["check"] == "reference"]
    said = "given the inputs of rank 0, the script fails: AssertionError: alone"
    assert said in reference["reason"]
