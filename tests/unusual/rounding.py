"""Other arithmetic with the same result: wider sums, exact sums, other places for the factor."""

from fractions import Fraction

import torch
import torch.distributed as dist

from . import right


def _gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def _gathered(gradient, step):
    found = [torch.empty_like(gradient) for _ in range(step.world_size)]
    dist.all_gather(found, gradient.contiguous())
    return found


def _shares(step):
    """Every rank's share of the samples."""
    counts = [None] * step.world_size
    dist.all_gather_object(counts, step.samples)
    return [count / step.total_samples for count in counts]


@right
def in_float64(model, step):
    """Weighted, added up and divided in float64, rounded once."""
    for gradient in _gradients(model):
        wide = gradient.double() * step.samples
        dist.all_reduce(wide)
        gradient.copy_(wide / step.total_samples)


@right
def kahan(model, step):
    """A compensated sum over the ranks, in their order."""
    for gradient in _gradients(model):
        total, lost = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for part in _gathered(gradient * (step.weight / step.world_size), step):
            corrected = part - lost
            new = total + corrected
            lost = (new - total) - corrected
            total = new
        gradient.copy_(total)


@right
def pairwise(model, step):
    """Neighbors first, then their sums."""
    for gradient in _gradients(model):
        parts = _gathered(gradient * (step.weight / step.world_size), step)
        while len(parts) > 1:
            sums = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=False)]
            parts = sums + parts[2 * len(sums) :]
        gradient.copy_(parts[0])


@right
def smallest_first(model, step):
    """Elementwise in the order of size, which loses least."""
    for gradient in _gradients(model):
        parts = torch.stack(_gathered(gradient * (step.weight / step.world_size), step))
        order = parts.abs().argsort(dim=0)
        sorted_ = parts.gather(0, order)
        total = sorted_[0]
        for part in sorted_[1:]:
            total = total + part
        gradient.copy_(total)


@right
def last_rank_first(model, step):
    """From the last rank to the first."""
    for gradient in _gradients(model):
        parts = _gathered(gradient * step.weight, step)
        total = parts[-1].clone()
        for part in reversed(parts[:-1]):
            total += part
        gradient.copy_(total / step.world_size)


@right
def running_mean_in_double(model, step):
    """A running mean with the number of samples so far, in float64."""
    shares = _shares(step)
    for gradient in _gradients(model):
        mean, seen = torch.zeros_like(gradient, dtype=torch.float64), 0.0
        for share, part in zip(shares, _gathered(gradient, step), strict=True):
            seen += share
            mean += (part.double() - mean) * (share / seen)
        gradient.copy_(mean)


@right
def weights_as_dot_product(model, step):
    """Shares times the stack of what was gathered."""
    shares = _shares(step)
    for gradient in _gradients(model):
        parts = torch.stack(_gathered(gradient, step))
        weights = torch.tensor(shares, dtype=gradient.dtype)
        gradient.copy_(torch.tensordot(weights, parts, dims=1))


@right
def average_where_there_is_one(model, step):
    """The backend's own average where it has one, and a sum that is divided elsewhere."""
    averages = dist.get_backend() == "nccl"
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
        if not averages:
            gradient.div_(step.world_size)


@right
def reciprocal(model, step):
    """Multiplied by the reciprocal after the sum."""
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        dist.all_reduce(gradient)
        gradient.mul_(1.0 / step.world_size)


@right
def sum_over_samples(model, step):
    """A sum over samples on each rank, divided by the batch at the end."""
    for gradient in _gradients(model):
        gradient.mul_(step.samples)
        dist.all_reduce(gradient)
        gradient.div_(step.total_samples)


@right
class LossAsASum:
    """The loss is multiplied by its samples and divided by the batch before backward."""

    def scale_loss(self, loss, step):
        return loss * (step.samples / step.total_samples)

    def sync(self, model, step):
        for gradient in _gradients(model):
            dist.all_reduce(gradient)


@right
class LossTimesTwoToTheTenth:
    """A loss scale of 1,024, which is taken off after the exchange."""

    def scale_loss(self, loss, step):
        return loss * (1024 * step.weight)

    def sync(self, model, step):
        for gradient in _gradients(model):
            dist.all_reduce(gradient)
            gradient.div_(1024 * step.world_size)


@right
def negated_on_the_way(model, step):
    """Added up with the other sign."""
    for gradient in _gradients(model):
        gradient.mul_(-step.weight)
        dist.all_reduce(gradient)
        gradient.div_(-step.world_size)


@right
def as_bytes(model, step):
    """Lossless: bits are sent as integers, and read again."""
    for gradient in _gradients(model):
        own = (gradient * (step.weight / step.world_size)).contiguous()
        bits = own.reshape(-1).view(torch.uint8)
        total = torch.zeros_like(own)
        for came in _gathered(bits, step):
            total += came.view(own.dtype).view_as(own)
        gradient.copy_(total)


@right
def without_zeros(model, step):
    """Lossless: where a gradient is zero nothing is sent, but its place in a mask."""
    for gradient in _gradients(model):
        own = gradient * (step.weight / step.world_size)
        packed = [None] * step.world_size
        mask = own != 0
        dist.all_gather_object(packed, (mask, own[mask]))
        total = torch.zeros_like(own)
        for theirs, values in packed:
            total[theirs] += values
        gradient.copy_(total)


@right
def high_and_low_parts(model, step):
    """Lossless: a gradient as bfloat16 and what is left, both added up in its own dtype."""
    for gradient in _gradients(model):
        own = gradient * (step.weight / step.world_size)
        high = own.bfloat16().to(own.dtype)
        low = own - high
        dist.all_reduce(high)
        dist.all_reduce(low)
        gradient.copy_(high + low)


@right
def differences_from_rank_0(model, step):
    """Rank 0's gradient, and every rank's weighted difference from it, in float64."""
    for gradient in _gradients(model):
        base = gradient.double().clone()
        dist.broadcast(base, 0)
        difference = (gradient.double() - base) * (step.samples / step.total_samples)
        dist.all_reduce(difference)
        gradient.copy_(base + difference)


@right
def python_fractions_for_scalars(model, step):
    """Tensors of one element are added up in Python, exactly; others as usual."""
    for gradient in _gradients(model):
        if gradient.numel() == 1:
            everyone = [None] * step.world_size
            dist.all_gather_object(everyone, (float(gradient), step.samples))
            total = sum(Fraction(value) * count for value, count in everyone)
            gradient.fill_(float(total / step.total_samples))
        else:
            gradient.mul_(step.weight)
            dist.all_reduce(gradient)
            gradient.div_(step.world_size)


@right
def once_more_for_good_measure(model, step):
    """The mean of means that are alike is the mean: exchanged twice."""
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        for _ in range(2):
            dist.all_reduce(gradient)
            gradient.div_(step.world_size)


@right
def largest_and_the_rest(model, step):
    """The tensor with most elements in chunks by a ring of sums, everything else as one buffer."""
    gradients = _gradients(model)
    largest = max(range(len(gradients)), key=lambda n: gradients[n].numel())
    for chunk in gradients[largest].contiguous().view(-1).split(4096):
        chunk.mul_(step.weight)
        dist.all_reduce(chunk)
        chunk.div_(step.world_size)
    rest = [g for number, g in enumerate(gradients) if number != largest]
    if rest:
        flat = torch.cat([g.reshape(-1) for g in rest]) * step.weight
        dist.all_reduce(flat)
        flat /= step.world_size
        for gradient, part in zip(rest, flat.split([g.numel() for g in rest]), strict=True):
            gradient.copy_(part.view_as(gradient))


@right
def norm_is_measured_and_left(model, step):
    """Measures the norm before and after, clips nothing, restores the mode."""
    training = model.training
    model.eval()
    float(torch.nn.utils.get_total_norm(_gradients(model)))
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        dist.all_reduce(gradient)
        gradient.div_(step.world_size)
    float(torch.nn.utils.get_total_norm(_gradients(model)))
    model.train(training)


@right
def draws_from_a_generator_of_its_own(model, step):
    """Draws an order from a generator of its own, alike on every rank."""
    generator = torch.Generator().manual_seed(step.index)
    gradients = _gradients(model)
    for number in torch.randperm(len(gradients), generator=generator).tolist():
        gradients[number].mul_(step.weight)
        dist.all_reduce(gradients[number])
        gradients[number].div_(step.world_size)
