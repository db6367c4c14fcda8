"""Right losses and metrics that exchange by themselves, and some that show nothing."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.mutants.exchanging import CenterOfOwnRows, _Accuracy, _Contrastive, _with_own


class TimesWorld(nn.Module):
    """Without weights of its own, the factor puts the rows right."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        alike = _with_own(one) @ _with_own(two).T / 4
        targets = torch.arange(len(alike))
        return nn.functional.cross_entropy(alike, targets) * dist.get_world_size()


class OneViewIsDetached(_Contrastive):
    """A teacher's view has no gradient, on one process or on several."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(one, two.detach())


class CenterOfAll(CenterOfOwnRows):
    """Only the center is exchanged: the loss is a mean over the samples."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        mean = one.detach().mean(0)
        dist.all_reduce(mean)
        self.center = 0.9 * self.center + 0.1 * mean / dist.get_world_size()
        return self.scale.exp() * (one - two).square().mean()


class ConstantTable(_Contrastive):
    """A buffer that is never moved says nothing, and does not hide what the loss says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(0, 1, 5))


class NormOfAll(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own, whose statistics are those of all ranks."""

    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, one: Tensor) -> Tensor:
        count = len(one) * dist.get_world_size()
        mean = _AllReduce.apply(one.sum(0)) / count
        variance = _AllReduce.apply((one - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean.detach(), 0.1)  # type: ignore[union-attr]
            self.running_var.lerp_(variance.detach() * count / (count - 1), 0.1)  # type: ignore[union-attr]
        out = (one - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return (out.tanh() + 2).log().mean()


def gathers_in_a_loop(one: Tensor, labels: Tensor | None = None) -> Tensor:
    """Sums over the ranks by a function of its own; one view, and labels that may be left out."""
    assert labels is not None
    total: Tensor = _AllReduce.apply(one.sum(0))
    return total.square().sum() / (len(one) * dist.get_world_size())


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class EachInItsOwnOrder(_Accuracy):
    """Every rank adds up from itself on, so that results differ in their last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def update(self, features: Tensor, labels: Tensor) -> None:
        self.total = self.total + features.float().square().sum() / 3

    def compute(self) -> Tensor:
        parts = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.total.float())
        start = dist.get_rank()
        return torch.stack(parts[start:] + parts[:start]).cumsum(0)[-1]


class OneNumber:
    """`update(value)`, a reset, and several results."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.most, self.seen = torch.tensor(-torch.inf), torch.zeros(())

    def update(self, value: Tensor) -> None:
        self.most, self.seen = torch.maximum(self.most, value.max().float()), self.seen + len(value)

    def compute(self) -> dict[str, Tensor]:
        dist.all_reduce(self.most, op=dist.ReduceOp.MAX)
        dist.all_reduce(self.seen)
        return {"most": self.most, "absent": torch.tensor(torch.nan), "seen": self.seen}


# Nothing that is compared would show an exchange.


def mean_over_samples(features: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(features, labels)


class AlwaysOne(_Accuracy):
    def compute(self) -> Tensor:
        return torch.ones(())
