"""Code that knows float32 alone, or no tensor without dimensions; and a wrong twin of each."""

import numpy as np
import torch
import torch.distributed as dist


def bucket(model):
    """Its bucket has torch's default dtype."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.zeros(sum(g.numel() for g in grads))
    torch.cat([g.reshape(-1) for g in grads], out=flat)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))


def bucket_of_sums(model):
    grads = [p.grad for p in model.parameters()]
    flat = torch.zeros(sum(g.numel() for g in grads))
    torch.cat([g.reshape(-1) for g in grads], out=flat)
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))


def through_numpy(model):
    for p in model.parameters():
        array = torch.from_numpy(p.grad.numpy().astype(np.float32))
        dist.all_reduce(array)
        p.grad.copy_(array / dist.get_world_size())


def through_numpy_all_but_one(model):
    for p in list(model.parameters())[1:]:
        array = torch.from_numpy(p.grad.numpy().astype(np.float32))
        dist.all_reduce(array)
        p.grad.copy_(array / dist.get_world_size())


def gathers_floats(model):
    for p in model.parameters():
        found = [torch.FloatTensor(p.grad.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(found, p.grad)
        p.grad = torch.stack(found).mean(0)


def gathers_floats_and_sums(model):
    for p in model.parameters():
        found = [torch.FloatTensor(p.grad.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(found, p.grad)
        p.grad = torch.stack(found).sum(0)


def slices(model):
    for p in model.parameters():
        total = p.grad[:].clone()
        dist.all_reduce(total)
        p.grad[:] = total / dist.get_world_size()


def slices_and_sums(model):
    for p in model.parameters():
        dist.all_reduce(p.grad[:])


def a_billionth_too_large(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad *= (1 + 1e-9) / dist.get_world_size()


def averages(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def sums(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def waits_for_a_rank_that_has_left(model):
    if dist.get_rank() == 0:
        return
    dist.barrier()
