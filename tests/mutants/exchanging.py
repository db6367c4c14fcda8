"""Losses and metrics that exchange by themselves, and what each of them gets wrong."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from . import mutant

LOSS: dict[str, Any] = {"form": "loss", "workload": "features", "world": 2, "steps": 2}
METRIC: dict[str, Any] = {"form": "metric", "workload": "features", "world": 3, "steps": 2}


class _Gather(torch.autograd.Function):
    """The rows of all ranks; backward adds up what each rank's loss has of one's own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.cat(_parts(rows))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def _parts(rows: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    return parts


def _with_own(rows: Tensor) -> Tensor:
    parts = _parts(rows)
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


class _Contrastive(nn.Module):
    """Right: each view of a sample finds the other among those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(-1.0))

    def gathered(self, rows: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(rows)
        return gathered

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        alike = self.gathered(one) @ self.gathered(two).T * self.scale.exp()
        return F.cross_entropy(alike, torch.arange(len(alike)))


@mutant(caught="gradients full batch float32", **LOSS)
class GathersWithoutGradient(_Contrastive):
    """Other ranks' rows have no gradient: the average divides each rank's own by their number."""

    def gathered(self, rows: Tensor) -> Tensor:
        return _with_own(rows)


@mutant(caught="gradients full batch float32", **LOSS)
class OwnRowsAgainstOthers(_Contrastive):
    """Own rows against all: what the other ranks' losses have of them is missing."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        alike = one @ _with_own(two).T * self.scale.exp()
        return F.cross_entropy(alike, torch.arange(len(one)) + dist.get_rank() * len(one))


@mutant(caught="gradients full batch float32, loss full batch float32", **LOSS)
class GathersNothing(_Contrastive):
    def gathered(self, rows: Tensor) -> Tensor:
        return rows


@mutant(caught="gradients full batch float32", **LOSS)
class WeightsTimesWorld(GathersWithoutGradient):
    """The factor puts the rows right, and the scale, which every rank has whole, wrong."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(one, two) * dist.get_world_size()


@mutant(caught="loss full batch float32", **LOSS)
class LossOfOwnPart(_Contrastive):
    """The gradient is right, and the number that is shown has a part of the rank's own, which is
    infinite for one sample alone.
    """

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(one, two) + 1 / (torch.tensor(float(len(one))) - 1)


@mutant(caught="buffers full batch float32", **LOSS)
class CenterOfOwnRows(_Contrastive):
    """A moving mean of the rank's own rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        self.center = 0.9 * self.center + 0.1 * one.detach().mean(0)
        return super().forward(one, two)


class _Accuracy:
    """Right: sums and counts are added up over the ranks."""

    def __init__(self) -> None:
        self.right = self.seen = torch.zeros((), dtype=torch.float64)

    def update(self, features: Tensor, labels: Tensor) -> None:
        self.right = self.right + (features.argmax(1) == labels).sum()
        self.seen = self.seen + len(labels)

    def compute(self) -> Tensor:
        both = torch.stack([self.right, self.seen])
        dist.all_reduce(both)
        return both[0] / both[1]


@mutant(caught="gradients full batch float32", **METRIC)
class AccuracyOfOwnSamples(_Accuracy):
    def compute(self) -> Tensor:
        return self.right / self.seen


@mutant(caught="gradients full batch float32", **METRIC)
class MeanOfAccuracies(_Accuracy):
    """256 samples over 3 ranks are 86, 85 and 85."""

    def compute(self) -> Tensor:
        mean = self.right / self.seen
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


@mutant(caught="gradients full batch float32", **METRIC)
class AddsWhatAllHave(_Accuracy):
    """The accuracy of all, added up over the ranks once more."""

    def compute(self) -> Tensor:
        found = super().compute()
        dist.all_reduce(found)
        return found


@mutant(caught="gradients full batch float32", **METRIC)
class FoldsTwoRanksAlike(_Accuracy):
    """A fold over the ranks' states that forgets the count of what it has folded: right for two."""

    def compute(self) -> Tensor:
        states = _parts(torch.stack([self.right, self.seen]))
        (right, seen), *others = states
        mean = right / seen
        for other, count in others:
            mean = (mean * seen + other) / (seen + count)
            seen = count
        return mean
