"""Expert parallelism: each rank has some of the experts, and tokens go to them by all-to-all; with a
loss that balances the experts, over the tokens of all ranks.

torchrun --nproc-per-node 2 experts.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, EXPERTS, CLASSES = 16, 4, 5


class Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sizes = sent, received
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.sizes
        found = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(found, gradient.contiguous(), sent, received)
        return found, None, None


class MeanOfRanks(torch.autograd.Function):
    """The mean over the ranks; their gradients are averaged after backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Experts(nn.Module):
    """Each token goes to one expert."""

    def __init__(self, mesh):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        weights = torch.randn(EXPERTS, WIDTH, WIDTH) / 4
        self.weights = nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)]))

    def forward(self, x):
        world = dist.get_world_size()
        each = EXPERTS // world
        share, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert // each, minlength=world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sizes = sent.tolist(), received.tolist()
        rows = Exchange.apply(x[order], *sizes)
        numbers = torch.empty(sum(sizes[1]), dtype=torch.int64)
        dist.all_to_all_single(numbers, expert[order], sizes[1], sizes[0])
        own = self.weights.to_local()[numbers % each]  # type: ignore[attr-defined]
        mixed = torch.bmm(rows[:, None], own)[:, 0]
        mixed = Exchange.apply(mixed, sizes[1], sizes[0])
        return share[:, None] * torch.zeros_like(x).index_copy(0, order, mixed)

    def balance(self, x):
        """How unevenly experts are used: shares of tokens times mean probabilities."""
        likely = self.router(x).softmax(-1)
        used = F.one_hot(likely.argmax(-1), EXPERTS).float().mean(0)
        dist.all_reduce(used)
        used = used / dist.get_world_size()
        return EXPERTS * (used * MeanOfRanks.apply(likely.mean(0))).sum()


class Net(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.into, self.out = nn.Linear(20, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.experts = Experts(mesh)

    def forward(self, x):
        x = self.into(x)
        return self.out(x + self.experts(x)), self.experts.balance(x)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    model = Net(mesh)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 20, generator=drawn), torch.randint(0, CLASSES, (64,), generator=drawn)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            logits, balance = model(inputs)
            loss = F.cross_entropy(logits, labels) + 0.1 * balance
            loss.backward()
            for parameter in model.parameters():
                if parameter is not model.experts.weights:
                    dist.all_reduce(parameter.grad)
                gradient = parameter.grad
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                gradient /= world
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
