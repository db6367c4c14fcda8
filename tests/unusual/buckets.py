"""Buckets, buffers and views: how gradients are put together and taken apart."""

import random
from collections import defaultdict
from itertools import islice

import torch
import torch.distributed as dist

from . import right


def _reduce(tensor, step):
    tensor.mul_(step.weight)
    dist.all_reduce(tensor)
    tensor.div_(step.world_size)


def _together(gradients, step):
    flat = torch.cat([g.reshape(-1) for g in gradients])
    _reduce(flat, step)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


@right
def backwards(model, step):
    """From the last parameter to the first."""
    for gradient in reversed(_gradients(model)):
        _reduce(gradient, step)


@right
def by_dtype(model, step):
    """A bucket for each dtype."""
    buckets = defaultdict(list)
    for gradient in _gradients(model):
        buckets[gradient.dtype].append(gradient)
    for dtype in sorted(buckets, key=str):
        _together(buckets[dtype], step)


@right
def by_shape(model, step):
    """Gradients of one shape in a stack."""
    buckets = defaultdict(list)
    for gradient in _gradients(model):
        buckets[gradient.shape].append(gradient)
    for alike in buckets.values():
        stacked = torch.stack(alike)
        _reduce(stacked, step)
        for gradient, part in zip(alike, stacked, strict=True):
            gradient.copy_(part)


@right
def by_module(model, step):
    """One bucket for each module that has parameters of its own."""
    taken = set()
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p not in taken]
        taken.update(own)
        gradients = [p.grad for p in own if p.grad is not None]
        if gradients:
            _together(gradients, step)


@right
def in_fives(model, step):
    """Five tensors at a time, the last bucket with what is left."""
    gradients = iter(_gradients(model))
    while bucket := list(islice(gradients, 5)):
        _together(bucket, step)


@right
def by_bytes(model, step):
    """Buckets of at most 64 KiB; what is larger goes alone."""
    bucket, size = [], 0
    for gradient in _gradients(model):
        wanted = gradient.numel() * gradient.element_size()
        if bucket and size + wanted > 64 << 10:
            _together(bucket, step)
            bucket, size = [], 0
        bucket.append(gradient)
        size += wanted
    if bucket:
        _together(bucket, step)


@right
def shuffled_with_a_fixed_seed(model, step):
    """An order that is drawn alike on every rank, and anew in every step."""
    gradients = _gradients(model)
    random.Random(7 + step.index).shuffle(gradients)
    _together(gradients, step)


@right
def sorted_by_name(model, step):
    """In the order of names as text, packed and unpacked."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    _together([named[name] for name in sorted(named)], step)


@right
def padded_to_the_world(model, step):
    """The buffer is padded to a multiple of 128 times the world."""
    gradients = _gradients(model)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    unit = 128 * step.world_size
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % unit))
    _reduce(padded, step)
    parts = padded[: len(flat)].split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@right
def every_tensor_in_chunks(model, step):
    """1,000 elements at a time."""
    for gradient in _gradients(model):
        flat = gradient.contiguous().view(-1)
        for chunk in flat.split(1000):
            _reduce(chunk, step)
        gradient.copy_(flat.view_as(gradient))


@right
def gradients_become_views(model, step):
    """The buffer stays, and p.grad becomes a view of it."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    _reduce(flat, step)
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


@right
class OneFlatBuffer:
    """Gradients are views of one buffer from the start, into which backward adds up."""

    def wrap(self, model):
        self.parameters = list(model.parameters())
        first = self.parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype)
        return model

    def scale_loss(self, loss, step):
        self.flat.zero_()
        parts = self.flat.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return loss

    def sync(self, model, step):
        _reduce(self.flat, step)


@right
def new_tensors(model, step):
    """p.grad is replaced, never written into."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            fresh = parameter.grad.clone()
            _reduce(fresh, step)
            parameter.grad = fresh


@right
def through_data(model, step):
    """Into p.grad.data, as old code has it."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad.data.mul_(step.weight))
            parameter.grad.data /= step.world_size


@right
def waits_for_all_futures(model, step):
    """All collectives at once, then one wait for all of their futures."""
    gradients = _gradients(model)
    for gradient in gradients:
        gradient.mul_(step.weight / step.world_size)
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    torch.futures.wait_all([work.get_future() for work in works])


@right
def all_reduce_coalesced(model, step):
    """gloo's coalesced all-reduce, a list for each dtype."""
    buckets = defaultdict(list)
    for gradient in _gradients(model):
        gradient.mul_(step.weight / step.world_size)
        buckets[gradient.dtype].append(gradient)
    for dtype in sorted(buckets, key=str):
        dist.all_reduce_coalesced(buckets[dtype])


@right
def with_a_sentinel(model, step):
    """A number behind the gradients, which must come back as the world's size."""
    gradients = _gradients(model)
    one = torch.ones(1).to(gradients[0])
    flat = torch.cat([*[(g * (step.weight / step.world_size)).reshape(-1) for g in gradients], one])
    dist.all_reduce(flat)
    assert round(float(flat[-1])) == step.world_size
    parts = flat[:-1].split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@right
def samples_beside_the_gradients(model, step):
    """Sums over samples and the number of samples in one buffer; divided by what comes back."""
    gradients = _gradients(model)
    count = torch.full((1,), float(step.samples)).to(gradients[0])
    flat = torch.cat([*[(g * step.samples).reshape(-1) for g in gradients], count])
    dist.all_reduce(flat)
    flat.div_(flat[-1].clone())
    parts = flat[:-1].split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@right
def two_flat_halves(model, step):
    """Matrices in one buffer, everything else in another."""
    gradients = _gradients(model)
    for chosen in (True, False):
        half = [g for g in gradients if (g.ndim > 1) is chosen]
        if half:
            _together(half, step)


@right
class AbsentIsAgreedOn:
    """Which gradients there are is agreed on by all; a rank without one sends zeros and takes
    the mean, and where no rank has one it stays None.
    """

    def sync(self, model, step):
        parameters = list(model.parameters())
        has = torch.tensor([float(p.grad is not None) for p in parameters])
        dist.all_reduce(has, op=dist.ReduceOp.MAX)
        for parameter, wanted in zip(parameters, has.tolist(), strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _reduce(parameter.grad, step)


@right
def sparse_is_made_dense(model, step):
    """Sparse gradients are made dense for the exchange."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            _reduce(dense, step)
            parameter.grad = dense
