"""Tensor and sequence parallelism written by hand, with parameters that are DTensors.

torchrun --nproc-per-node 2 by_hand.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WIDTH, VOCABULARY, LENGTH = 16, 32, 8


class Copy(torch.autograd.Function):
    """What every rank has, to layers of which each has a part."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    """The sum of the ranks' terms."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def own_tokens(x):
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def of_all_tokens(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


class Split(torch.autograd.Function):
    """This rank's tokens."""

    @staticmethod
    def forward(ctx, x):
        return own_tokens(x)

    @staticmethod
    def backward(ctx, gradient):
        return of_all_tokens(gradient)


class Gather(torch.autograd.Function):
    """The tokens of all ranks, of which each then has the whole gradient."""

    @staticmethod
    def forward(ctx, x):
        return of_all_tokens(x)

    @staticmethod
    def backward(ctx, gradient):
        return own_tokens(gradient)


class Divided(nn.Module):
    """A linear layer of which each rank has some rows or columns."""

    def __init__(self, into, out, mesh, dim):
        super().__init__()
        weight = torch.randn(out, into) / into**0.5
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)]))

    def forward(self, x):
        return x @ self.weight.to_local().t()  # type: ignore[attr-defined]


class Net(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Divided(WIDTH, 4 * WIDTH, mesh, 0)
        self.down = Divided(4 * WIDTH, WIDTH, mesh, 1)
        self.shift = nn.ParameterDict({"bias": torch.randn(WIDTH) / 4})
        self.out = Divided(WIDTH, VOCABULARY, mesh, 0)

    def forward(self, tokens):
        x = self.embedding(tokens)
        normed = Gather.apply(self.norm(Split.apply(x)))
        hidden = F.gelu(self.up(Copy.apply(normed)))
        x = x + Reduce.apply(self.down(hidden)) + self.shift["bias"]
        return self.out(Copy.apply(x))  # of this rank's words


def loss_of(logits, targets):
    """Cross-entropy, where each rank has the logits of some words."""
    most = logits.detach().amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    logits = logits - most[..., None]
    total = Reduce.apply(logits.exp().sum(-1))
    own = targets - dist.get_rank() * logits.shape[-1]
    is_own = (own >= 0) & (own < logits.shape[-1])
    picked = logits.gather(-1, own.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
    return (total.log() - Reduce.apply(picked * is_own)).mean()


def clip(model, most):
    """By the norm of all gradients, of which each element counts once."""
    gradients = [p.grad for p in model.parameters()]
    divided = [g.to_local() for g in gradients if hasattr(g, "to_local")]
    alike = [g for g in gradients if not hasattr(g, "to_local")]
    square = torch.stack([g.square().sum() for g in divided]).sum()
    dist.all_reduce(square)
    square = square + torch.stack([g.square().sum() for g in alike]).sum()
    for g in divided + alike:
        g.mul_(min(1.0, most / (square.sqrt().item() + 1e-6)))


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Net(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(10):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=drawn)
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        for parameter in model.norm.parameters():  # of this rank's tokens
            dist.all_reduce(parameter.grad)
        clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
