"""Whole scripts that are judged as their users would see it: what the reference repeats, what ranks
decide together, and forward passes and collectives in unusual places.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.job.test_examples import cli

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
# The fakes of a step train both networks, and losses are reduced to be logged before backward.
GAN = """
maker, critic = nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1))
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
MEAN = "dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"
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
SCRIPTS = {
    "a GAN that logs": (GAN, 0, set(), set()),
    "flipped": (BY_HAND % f"{MEAN}; p.grad.neg_()", 0, set(), {"wrong-sign"}),
    "one step old": (BY_HAND % STALE, 0, set(), {"stale-gradient"}),
    "of rank 0": (BY_HAND % "dist.broadcast(p.grad, 0)", 1,
                  {"single-rank-gradient", "dropped-rank", "duplicated-rank"}, set()),
    "micro-batches": (SPLIT % "y", 0, set(), set()),
    "micro-batches, each a mean": (SPLIT % "b", 1, {"accumulation-not-scaled"}, set()),
}  # fmt: skip
OFTEN = ("a GAN that logs", "of rank 0", "micro-batches")


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.sweep) for n in SCRIPTS]
)
def test_a_script_is_judged(name: str, tmp_path: Path) -> None:
    script, code, causes, remarks = SCRIPTS[name]
    (tmp_path / "train.py").write_text(HEAD + script)
    words = ("--steps", "4", "--json", "report.json", "--nproc", "2")
    ran = cli("job", tmp_path, *words, "--", sys.executable, "train.py")
    assert ran.returncode == code, ran.stdout + ran.stderr
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert {one["cause"] for one in case["diagnosis"]} == causes
    assert {one["cause"] for one in case.get("remarks", ())} == remarks
