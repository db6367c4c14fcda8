"""A backward of its own that accumulates, and a contract that does not say so."""

import torch.distributed as dist

from . import right


class _Accumulates:
    parts = 2

    def backward(self, loss_of, batch, step):
        total = 0.0
        for part in batch.split(self.parts):
            loss = loss_of(part)
            (loss * len(part.ids) / step.samples).backward()
            total += loss.detach() * len(part.ids) / step.samples
        return total

    def sync(self, model, step):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= step.weight
                dist.all_reduce(parameter.grad)
                parameter.grad /= step.world_size


@right
class ThreeMicroBatches(_Accumulates):
    """Multiplies, then divides: other roundings than those of a share."""

    parts = 3


@right
class TwoMicroBatches(_Accumulates):
    """Two of them."""
