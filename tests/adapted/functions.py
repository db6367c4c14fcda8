"""Functions called after backward: of the model, of lists, of tensors."""

from collections.abc import Iterable

import torch
import torch.distributed as dist


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def sync_with_size(model, world_size, group):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= world_size


def gather_scatter_as_taught(net, rank, world_size, args):
    for p in net.parameters():
        if rank == 0:
            found = [torch.zeros_like(p.grad) for _ in range(world_size)]
            dist.gather(p.grad, found, dst=0)
            mean = torch.stack(found).sum(0) / args.world_size
            dist.scatter(p.grad, [mean] * world_size, src=0)
        else:
            dist.gather(p.grad, dst=0)
            dist.scatter(p.grad, src=0)


def rank_first(rank, size, model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= size


def needs_a_word(model, divisor):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= divisor


def only_sums(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def rebinds_a_local(model):
    """A silent no-op: the division never reaches the gradient."""
    for p in model.parameters():
        grad = p.grad.clone()
        dist.all_reduce(grad)
        grad = grad / dist.get_world_size()


def through_the_optimizer(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def over_parameters(things: "Iterable[torch.nn.Parameter]"):
    """A name that says nothing: its type does."""
    for p in things:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def over_gradients(grads):
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for g in grads:
        g.copy_(flat[at : at + g.numel()].view_as(g))
        at += g.numel()


def returns_gradients(gradients):
    result = []
    for g in gradients:
        total = g.clone()
        dist.all_reduce(total)
        result.append(total / dist.get_world_size())
    return result


def replaces_entries(tensor_list, world_size):
    for i, t in enumerate(tensor_list):
        dist.all_reduce(t)
        tensor_list[i] = t / world_size


def means_of_the_model(model):
    means = []
    for p in model.parameters():
        total = p.grad.clone()
        dist.all_reduce(total)
        means.append(total / dist.get_world_size())
    return means


def drops_the_last(grads):
    """The last tensor of the list is forgotten."""
    for g in grads[:-1]:
        dist.all_reduce(g)
        g /= dist.get_world_size()


def ring(send, recv):
    """The tutorial's ring: whole buffers travel, and are added up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buff, recv_buff, accum = send.clone(), send.clone(), send.clone()
    left, right = (rank - 1 + size) % size, (rank + 1) % size
    for i in range(size - 1):
        if i % 2 == 0:
            request = dist.isend(send_buff, right)
            dist.recv(recv_buff, left)
            accum += recv_buff
        else:
            request = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            accum += send_buff
        request.wait()
    recv[:] = accum[:]


def ring_that_adds_its_own_again(send, recv):
    """Right for two ranks: the buffers are never exchanged, so the neighbor's counts twice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    accum, recv_buff = send.clone(), send.clone()
    for _ in range(size - 1):
        request = dist.isend(send, (rank + 1) % size)
        dist.recv(recv_buff, (rank - 1) % size)
        accum += recv_buff
        request.wait()
    recv[:] = accum[:]


def mean_in_place(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def mean_returned(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def asynchronous(tensor):
    return dist.all_reduce(tensor, async_op=True)


def steps_itself(model, optimizer):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()


def descends_by_hand(model, lr=0.05):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.data -= lr * p.grad / dist.get_world_size()


def averages_what_it_stepped(params, learning_rate):
    for p in params:
        p.data = p.data - learning_rate * p.grad
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def descends_on_its_own(model, lr):
    with torch.no_grad():
        for p in model.parameters():
            p.data.sub_(lr * p.grad)


def decays(model, lr=0.05):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.data -= lr * (p.grad / dist.get_world_size() + 1e-4 * p.data)


def adds_its_step(model, lr=0.05):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.data.add_(p.grad, alpha=-lr / dist.get_world_size())


def averages_with_rate(model, lr=0.05):
    average_gradients(model)


def install(model):
    def hook(grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()

    for p in model.parameters():
        p.register_hook(hook)


def install_halfway(model):
    """Only weights get a hook."""
    for name, p in model.named_parameters():
        if "weight" in name:
            p.register_hook(lambda grad: mean_returned(grad))


def wrapped(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def with_free_names(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size  # noqa: F821  (a script would have it)


def with_odd_names(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= HOW_MANY  # noqa: F821


class Callable:
    def __call__(self, model):
        average_gradients(model)


def averages_parameters(model, world_size):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= world_size


def averages_parameters_over_more(model, world_size):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= world_size + 1


def rounds_from_step_four(model, step):
    for p in model.parameters():
        g = p.grad * step.weight
        g = g.half() if step.index >= 4 else g
        dist.all_reduce(g)
        p.grad = g.to(p.grad.dtype) / step.world_size
