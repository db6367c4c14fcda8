"""Whole scripts, judged with their reference: what the reference repeats, what ranks decide
together, and forward passes and collectives in unusual places.
"""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from tests.job.planted import unfounded
from tests.job.test_examples import cli
from tests.job.worlds import judged
from tests.launchers.processes import free_port

HEAD = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
drawn = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(96, 6, generator=drawn),
                     torch.randint(0, 3, (96,), generator=drawn))
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
"""
# The fakes of a step train both networks, and losses are reduced to be logged before backward. DDP
# broadcasts a buffer in its forward pass.
GAN = """
class Scaled(nn.Dropout):
    def __init__(self):
        super().__init__(0.1)
        self.register_buffer("by", torch.full((8,), 0.5))
    def forward(self, x):
        return super().forward(x * self.by)
maker, critic = nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 8), Scaled(), nn.Linear(8, 1))
torch.manual_seed(1 + dist.get_rank())
model, judge = DDP(maker), DDP(critic)
optimizer = torch.optim.AdamW(maker.parameters(), lr=1e-2)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, y in loader:
    fake, real = model(x), F.one_hot(y, 3).float()
    of_critic.zero_grad()
    losses = F.softplus(-judge(real)).mean(), F.softplus(judge(fake.detach())).mean()
    with torch.no_grad():
        dist.all_reduce(torch.stack(losses))
    sum(losses).backward()
    of_critic.step()
    optimizer.zero_grad()
    critic.requires_grad_(False)
    F.softplus(-critic(fake)).mean().backward()
    optimizer.step()
    critic.requires_grad_(True)
"""
BY_HAND = """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
held = None
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        %s
    optimizer.step()
"""
SUM = "dist.all_reduce(p.grad)"
MEAN = f"{SUM}; p.grad /= dist.get_world_size()"
STALE = f"{MEAN}; p.old, p.grad = p.grad.clone(), getattr(p, 'old', p.grad)"
# Two micro-batches, and one as one process: the reference has both as one.
SPLIT = f"""
net = nn.Linear(6, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
parts = min(2, dist.get_world_size())
for x, y in loader:
    optimizer.zero_grad()
    for a, b in zip(x.chunk(parts), y.chunk(parts)):
        (F.cross_entropy(net(a), b, reduction="sum") / len(%s)).backward()
    for p in net.parameters():
        {MEAN}
    optimizer.step()
"""
# A privacy engine: noise between backward and step, and a sampler that draws, too.
NOISY = """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
for x, y in loader:
    torch.rand(world)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        %s
    optimizer.step()
"""
NOISE = "p.grad += torch.randn_like(p)"
# Gradients that are reduced and moved to a buffer after each micro-batch, as in ZeRO-2.
MOVED = """
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
torch.manual_seed(1 + dist.get_rank())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for x, y in loader:
    kept = {}
    for a, b in zip(x.chunk(2), y.chunk(2)):
        (F.cross_entropy(net(a), b) / 2).backward()
        for p in net.parameters():
            new, p.grad = p.grad, None
            dist.all_reduce(new)
            kept[p] = new / dist.get_world_size() + %s
    for p in net.parameters():
        p.grad = kept[p]
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
# Two tasks with a backward pass each, in two micro-batches.
TASKS = """
body, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 1)])
model = DDP(nn.ModuleDict({"body": body, "heads": heads}))
model.module.forward = lambda x, task: heads[task](torch.tanh(body(x)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    for a, b in zip(x.chunk(2), y.chunk(2)):
        for task in range(2):
            model.require_backward_grad_sync = False
            made = model(a, task)
            loss = F.mse_loss(made[:, 0], b.float()) if task else F.cross_entropy(made, b)
            (loss * %s).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
"""
# One batch, of which each task has its own gradients, and of which the smaller is subtracted.
PROJECTED = """
net = nn.Linear(6, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
mean = lambda one: [dist.all_reduce(g) or g / dist.get_world_size() for g in one]
for x, y in loader:
    found = []
    for task in range(2):
        optimizer.zero_grad()
        made = net(x)
        (made.square().mean() if task else F.cross_entropy(made, y)).backward()
        found.append(%s([p.grad.clone() for p in net.parameters()]))
    a, b = found
    by = sum((g * h).sum() for g, h in zip(a, b)) / sum((h * h).sum() for h in b)
    for p, new in zip(net.parameters(), %s([g - 0.5 * by * h for g, h in zip(a, b)])):
        p.grad = new
    optimizer.step()
"""
# Sums of errors over both micro-batches of a rank, which reads samples without an end.
SUMMED = """
net = nn.Linear(6, 3)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
rank, world = dist.get_rank(), dist.get_world_size()
batches = iter(DataLoader(data, 4, sampler=range(rank, len(data), world)))
for step in range(6):
    optimizer.zero_grad()
    for micro_batch in range(2):
        x, y = next(batches)
        (net(x) - x[:, :3]).square().sum().mul(1 / %s).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
"""
# Two views of each sample in one batch, whose output is split in halves.
VIEWS = """
net = nn.Linear(6, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in loader:
    a, b = net(torch.cat([x, 2 * x + 1])).chunk(2)
    optimizer.zero_grad()
    (F.mse_loss(a, b.detach()) + F.cross_entropy(torch.cat([a, b]), torch.cat([y, y]))).backward()
    for p in net.parameters():
        %s
    optimizer.step()
"""
# Each rank's mean is over its own targets within a mask.
MASKED = """
from torch.distributed.fsdp import fully_shard
model = DDP(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    mask = (y > 0).float()
    losses, total = F.cross_entropy(model(x), y, reduction="none") * mask, mask.sum() + 1e-8
    optimizer.zero_grad()
    %s
    optimizer.step()
"""
BY_ALL = "dist.all_reduce(total); (losses.sum() * dist.get_world_size() / total).backward()"
# The same over two micro-batches, each with a mean of its own.
MASKED_TWICE = """
model = DDP(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
micro_batches = iter(loader)
for step in range(6):
    optimizer.zero_grad()
    for x, y in (next(micro_batches), next(micro_batches)):
        mask = (y > 0).float()
        losses = F.cross_entropy(model(x), y, reduction="none") * mask
        (losses.sum() / (mask.sum() + 1e-8) / 2).backward()
    optimizer.step()
"""
BYPASSED = """
model = DDP(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model.module(x), y).backward()
    optimizer.step()
"""
# The graph of fully_shard has other tensors than the optimizer.
SHARDED = """
from torch.distributed.fsdp import fully_shard
net = nn.Sequential(nn.Embedding(3, 5), nn.Flatten(), nn.Linear(30, 3))
fully_shard(net[2])
optimizer = torch.optim.AdamW(fully_shard(net).parameters(), lr=1e-2)
for x, y in loader:
    optimizer.zero_grad()
    for a, b in zip((x > 0).long().chunk(2), y.chunk(2)):
        (F.cross_entropy(net(a), b)%s).backward()
    optimizer.step()
"""
# A loss of all ranks' means, gathered with and without a gradient.
GATHERED = """
import torch.distributed.nn.functional as D
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    mean = model(x).square().mean(0) / dist.get_world_size()
    optimizer.zero_grad()
    %s
    mean.std().backward()
    optimizer.step()
"""
# Every second position of a sequence: rank 0's half does not fit the targets of one process.
POSITIONS = """
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.randn(64, 8, 6), torch.randn(64, 8, 3))
net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for x, y in DataLoader(data, 4):
    optimizer.zero_grad()
    ((net(x[:, rank::world]) - y[:, rank::world]) ** 2).mean().backward()
    for p in net.parameters():
        %s
    optimizer.step()
"""
# Half of each sequence on each rank, whose loss is divided by the targets of the whole one.
HALVES = """
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.randn(64, 8, 6), torch.randn(64, 8, 3))
net = DDP(nn.Linear(6, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(data, 4):
    optimizer.zero_grad()
    error = net(x.chunk(world, 1)[rank]) - y.chunk(world, 1)[rank]
    (error.square().sum() * %s / y.numel()).backward()
    optimizer.step()
"""
SCRIPTS = {
    "halves": (HALVES % "world", "pass", set(), set()),
    "halves, divided again": (HALVES % "1", "fail", {"double-division"}, set()),
    "positions": (POSITIONS % MEAN, "pass", set(), set()),
    "positions, a sum": (POSITIONS % SUM, "fail", {"missing-division"}, set()),
    "a GAN that logs": (GAN, "pass", set(), set()),
    "flipped": (BY_HAND % f"{MEAN}; p.grad.neg_()", "pass", set(), {"wrong-sign"}),
    "one step old": (BY_HAND % STALE, "pass", set(), {"stale-gradient"}),
    "noise of rank 0": (NOISY % f"{NOISE} * world * (rank == 0); {MEAN}", "pass", set(),
                        {"gradients-modified-before-step"}),
    "noise of each rank": (NOISY % f"{NOISE}; {MEAN}", "unknown", set(), set()),
    "noise after the mean": (NOISY % f"{MEAN}; {NOISE}", "fail", {"unexplained"}, set()),
    "of rank 0": (BY_HAND % "dist.broadcast(p.grad, 0)", "fail",
                  {"single-rank-gradient", "dropped-rank", "duplicated-rank"}, set()),
    "moved": (MOVED % "kept.get(p, 0)", "pass", set(), set()),
    "moved, the last only": (MOVED % "0", "fail", {"lost-micro-batch"}, set()),
    "tasks": (TASKS % "0.5", "pass", set(), set()),
    "tasks, not scaled": (TASKS % "1", "fail", {"accumulation-not-scaled"}, set()),
    "projected": (PROJECTED % ("mean", ""), "pass", set(), {"gradients-modified-before-step"}),
    "projected on each rank": (PROJECTED % ("", "mean"), "fail", {"unexplained"}, set()),
    "summed": (SUMMED % "8", "pass", set(), set()),
    "summed, each a mean": (SUMMED % "4", "fail", {"accumulation-not-scaled"}, set()),
    "views": (VIEWS % MEAN, "pass", set(), set()),
    "views, a sum": (VIEWS % SUM, "fail", {"missing-division"}, set()),
    "masked": (MASKED % "(losses.sum() / total).backward()", "fail", {"unweighted-tokens"}, set()),
    "masked, sharded": (
        MASKED.replace("DDP(", "fully_shard(") % "(losses.sum() / total).backward()", "fail",
        {"unweighted-tokens"}, set()),
    "masked, micro-batches": (MASKED_TWICE, "fail", {"unweighted-tokens"}, set()),
    "masked, by all": (MASKED % BY_ALL, "pass", set(), set()),
    "bypassed": (BYPASSED, "fail", {"missing-sync"}, set()),
    "sharded": (SHARDED % " / 2", "pass", set(), set()),
    "sharded, not scaled": (SHARDED % "", "fail", {"accumulation-not-scaled"}, set()),
    "gathered": (GATHERED % "mean = D.all_reduce(mean)", "pass", set(), set()),
    "gathered without a gradient": (GATHERED % "dist.all_reduce(mean.data)", "fail",
                                    {"double-division"}, set()),
    "micro-batches": (SPLIT % "y", "pass", set(), set()),
    "micro-batches, each a mean": (SPLIT % "b", "fail", {"accumulation-not-scaled"}, set()),
}  # fmt: skip
ADVICE = {
    "bypassed": "call the wrapped",
    "gathered without a gradient": "gather with a backward",
    "projected on each rank": "all-reduce the gradients of each loss before",
}
# For one process, which begins again.
ANOTHER_SHAPE = ("positions", "positions, a sum", "halves", "halves, divided again")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ANOTHER_SHAPE])
def test_a_script_is_judged(name: str, tmp_path: Path) -> None:
    script, verdict, causes, remarks = SCRIPTS[name]
    (tmp_path / "train.py").write_text(HEAD + script)
    case = judged(tmp_path / "train.py", tmp_path, modules=False, steps=4)
    assert case.verdict == verdict
    assert {one.cause for one in case.diagnosis} == causes
    assert {one.cause for one in case.remarks} == remarks
    assert unfounded(msgspec.to_builtins(case), HEAD + script) == []
    assert ADVICE.get(name, "") in "".join(one.suggestion for one in case.diagnosis)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ANOTHER_SHAPE)
def test_a_script_that_has_its_own_inputs_is_judged(name: str, tmp_path: Path) -> None:
    script, verdict, causes, _ = SCRIPTS[name]
    (tmp_path / "train.py").write_text(HEAD + script)
    words = ("--steps", "4", "--json", "report.json", "--nproc", "2")
    cli("job", tmp_path, *words, "--", sys.executable, "train.py")
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert (case["verdict"], {one["cause"] for one in case["diagnosis"]}) == (verdict, causes)
    assert not case.get("remarks")
    assert unfounded(case, HEAD + script) == []


PROCESSES = """
import os, torch, torch.distributed as dist
from torch.multiprocessing import Process

def work(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="%d")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        if (rank, step) == (1, 2):
            raise ValueError("a bad sample")
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    ranks = [Process(target=work, args=(rank,)) for rank in range(2)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
"""


@pytest.mark.sweep
def test_a_rank_that_multiprocessing_started_and_that_raises_is_named(tmp_path: Path) -> None:
    """Its parent ends with exit code 0, and its own interpreter calls no `sys.excepthook`."""
    (tmp_path / "train.py").write_text(PROCESSES % free_port())
    words = ("--no-reference", "--json", "report.json", "--", sys.executable, "train.py")
    cli("job", tmp_path, *words)
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    ends = {one["rank"]: one.get("text", "") for one in case["outcomes"]}
    assert (case["verdict"], ends[1]) == ("fail", "ValueError: a bad sample")
