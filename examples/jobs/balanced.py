"""A mixture of experts with a loss that balances them: local probabilities, and the tokens that the
experts receive on all ranks.

torchrun --nproc-per-node 2 balanced.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS, CLASSES = 4, 5


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(20, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 20, CLASSES) / 4)

    def forward(self, x):
        likely = self.router(x).softmax(-1)
        return torch.einsum("be,bi,eic->bc", likely, x, self.experts), likely


def balance(likely):
    """How unevenly experts are used: shares of the tokens of all ranks times mean probabilities."""
    used = F.one_hot(likely.argmax(-1), EXPERTS).sum(0)
    tokens = torch.tensor(len(likely))
    dist.all_reduce(used)
    dist.all_reduce(tokens)
    return EXPERTS * (used / tokens * likely.sum(0) / len(likely)).sum()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Experts())
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 20, generator=drawn), torch.randint(0, CLASSES, (64,), generator=drawn)
    )
    sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
            logits, likely = model(inputs)
            aux = balance(likely)
            loss = F.cross_entropy(logits, labels) + 0.1 * aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
