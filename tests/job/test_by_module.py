"""The first module that is wrong although what it is given is right: of a job beside its reference,
in a real world of two ranks.
"""

import shutil
from pathlib import Path

import pytest

from distcheck.records import CaseReport
from tests.job import worlds
from tests.job.planted import FOLDER

NET = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
how = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
odd = rank == 1
torch.manual_seed(0)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return 1.01 * g

class Block(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.norm = torch.nn.BatchNorm1d(8) if how == "BatchNorm" else torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.drop = torch.nn.Dropout(0.2 if "dropout" in how else 0.0)
    def forward(self, x):
        if how == "gradient" and odd and self.number == 1:
            x = Doubled.apply(x)
        h = self.up(self.norm(x))
        if how == "dropout of another seed" and odd and self.number == 1:
            with torch.random.fork_rng():
                torch.manual_seed(7)
                h = self.drop(h)
        else:
            h = self.drop(h)
        h = self.down(F.gelu(h))
        if how == "scaled" and odd and self.number == 1: h = 1.01 * h
        if how == "detached" and odd and self.number == 1: h = h.detach()
        return {"out": h, "number": self.number}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList([Block(0), Block(1)])
        self.head = torch.nn.Linear(8, 3)
    def forward(self, x):
        h = self.embed(x)
        for block in (*self.blocks, self.blocks[1]):
            again = how == "checkpoint" and block.number == 0
            h = h + (checkpoint(block, h, use_reentrant=False) if again else block(h))["out"]
        return self.head(h)

net = Net()
if how == "frozen": net.embed.requires_grad_(False)
model = DistributedDataParallel(net, find_unused_parameters=how == "detached", init_sync=False)
if how == "weight" and odd:
    with torch.no_grad(): net.blocks[0].up.weight.mul_(1.01)
passes = 2 if how == "accumulation" else 1
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randint(0, 3, (96,)))
sampler = torch.utils.data.DistributedSampler(data)
for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, 4, sampler=sampler)):
    if number == 0: torch.manual_seed(rank)
    (F.cross_entropy(model(x), y) / passes).backward()
    if number % passes == passes - 1:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


def judged(how: str, folder: Path, *, steps: int = 2) -> CaseReport:
    script = folder / "train.py"
    script.write_text(NET)
    return worlds.judged(script, folder / "run", how, steps=steps)


RIGHT = ["plain", "dropout", "accumulation", "BatchNorm", "frozen", "checkpoint"]
EVERYDAY = ("plain", "dropout")


@pytest.mark.parametrize(
    "how", [one if one in EVERYDAY else pytest.param(one, marks=pytest.mark.sweep) for one in RIGHT]
)
def test_no_module_of_a_right_job_is_accused(how: str, tmp_path: Path) -> None:
    case = judged(how, tmp_path)
    assert (case.verdict, case.diagnosis) == ("pass", ()), case
    found = case.modules
    assert found is not None
    assert not found.is_found, found.first
    assert {one.state for one in found.modules} <= {"same", "near"}, found.modules
    calls = 2 * 2 * (2 if how == "accumulation" else 1) * 18
    assert found.compared == calls


@pytest.mark.sweep
@pytest.mark.parametrize("script", ["nanogpt_like.py", "by_hand.py", "amp.py", "fsdp2.py"])
def test_no_module_of_an_example_is_accused(script: str, tmp_path: Path) -> None:
    """Batches one after the other, rank by rank, and together; in bfloat16; in parts."""
    shutil.copy(FOLDER / script, tmp_path / script)
    case = worlds.judged(tmp_path / script, tmp_path / "run")
    assert case.verdict == "pass", case
    assert case.modules is not None
    assert case.modules.first.startswith("no module "), case.modules.first
    assert {one.state for one in case.modules.modules} <= {"same", "near"}


WRONG = {  # the module, what is said of it, and the cause
    "weight": ("blocks.0.up", "its output is not", "initial-state-differs"),
    "scaled": ("blocks.1", "its output is not", "module-differs"),
    "detached": ("blocks.1", "takes part in backward in only", "module-differs"),
    "gradient": ("blocks.1", "returns is not", "module-differs"),
    "dropout of another seed": ("blocks.1.drop", "its output is not", "module-differs"),
}
WRONG_EVERYDAY = ("weight", "scaled")


@pytest.mark.parametrize(
    "how", [o if o in WRONG_EVERYDAY else pytest.param(o, marks=pytest.mark.sweep) for o in WRONG]
)
def test_the_first_wrong_module_is_named(how: str, tmp_path: Path) -> None:
    name, said, cause = WRONG[how]
    case = judged(how, tmp_path)
    found = case.modules
    assert found is not None
    assert (case.verdict, found.is_found, found.rank) == ("fail", True, 1), found.first
    assert found.name == name, found.first
    assert found.first.startswith(f"first wrong module: {name} (")
    assert said in found.first
    assert {one.name for one in found.modules if one.state == "wrong"} == {name}
    assert case.diagnosis[0].cause == cause
    assert found.first in case.diagnosis[0].evidence
