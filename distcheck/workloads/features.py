"""A table of features, one row per sample, for a loss or a metric that communicates.

With `--as loss` the code under test is the loss, and with `--as metric` the metric;
`training/adapters/forms/loss.py` inserts it here. The gradient of a row depends only on the sample
of that row, so an error in one rank's part is not hidden in a sum over the samples.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.machine.compat import tree_leaves
from distcheck.workloads.datasets.synthetic import hash24

SAMPLES, WIDTH, CLASSES = 1024, 8, 8
# Replacements for NaN and infinities in a result, which are equal to themselves.
_NOT_A_NUMBER, _INFINITE = -0.123456789, 12345.6789
_PARTS = 2  # updates of a metric; one more for an odd number of samples

Loss = Callable[..., torch.Tensor]
_OF_CROSS_ENTROPY = {"input": "features", "target": "labels"}


class NumberSamples:
    """Sample i is the number i. Its label is a class computed from a hash of i."""

    shape = (1,)
    classes = CLASSES

    def size(self, *, train: bool) -> int:
        return SAMPLES

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers [n, 1], exact in every dtype with 11 bits of precision, and labels [n]."""
        return ids.unsqueeze(1).to(dtype), hash24(ids * 8191 + 1) % CLASSES


def _table(seed: int) -> torch.Tensor:
    """Return random numbers [SAMPLES, WIDTH], larger in the column of the sample's class."""
    drawn = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))
    _, labels = NumberSamples().read(torch.arange(SAMPLES), train=True, dtype=drawn.dtype)
    return drawn + F.one_hot(labels, WIDTH)


class FeatureTable(nn.Module):
    """Sample numbers and labels -> the loss. `given` maps each argument of the loss to "labels", or
    to a separate view of the samples ("features").
    """

    def __init__(self, loss: Loss, given: Mapping[str, str]) -> None:
        super().__init__()
        self.loss, self._given = loss, given
        views = sum(role != "labels" for role in given.values())
        self.features = nn.ParameterList([nn.Parameter(_table(view)) for view in range(views)])

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, views = inputs[:, 0].long(), iter(self.features)
        return self.loss(
            **{
                name: labels if role == "labels" else next(views)[rows]
                for name, role in self._given.items()
            }
        )


class Workload:
    """Trains a table of features under a loss; cross-entropy by default."""

    def __init__(
        self,
        make: Callable[[], Loss] = lambda: F.cross_entropy,
        given: Mapping[str, str] = _OF_CROSS_ENTROPY,
    ) -> None:
        self._make, self._given = make, given

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the table, with the loss and its parameters."""
        return FeatureTable(self._make(), self._given)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(batch.inputs, batch.labels)
        return loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    def samples(self) -> NumberSamples:
        return NumberSamples()


class MetricModule(nn.Module):
    """Returns zero, and the result of a metric as the gradient of `compute`."""

    def __init__(self, make: Callable[[], Any], given: Mapping[str, str]) -> None:
        super().__init__()
        self._make, self._given = make, given
        self._metric = [make()]  # in a list, so that its parameters are not trained
        self._tables = [_table(view) for view in range(len(given))]
        samples = torch.arange(2 * WIDTH)
        inputs, labels = NumberSamples().read(samples, train=True, dtype=torch.get_default_dtype())
        self.compute = nn.Parameter(torch.zeros(len(self._measured(inputs, labels))))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return zero, with the result as its gradient."""
        found = self._measured(inputs, labels)
        if found.shape != self.compute.shape:
            raise ValueError(
                f"the metric's compute() returns {len(found)} numbers, but {len(self.compute)} "
                "for different samples; distcheck needs results of the same size"
            )
        return (self.compute * found.to(self.compute)).sum()

    @torch.no_grad()
    def _measured(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the numbers in the result of compute() for these samples, as one vector."""
        rows, given = inputs[:, 0].long().cpu(), dict[str, torch.Tensor]()
        for (name, role), table in zip(self._given.items(), self._tables, strict=True):
            view = table[rows].to(inputs)
            given[name] = {"labels": labels, "values": view[:, 0]}.get(role, view)
        metric = self._metric[0]
        if hasattr(metric, "reset"):
            metric.reset()
        else:
            metric = self._metric[0] = self._make()
        for part in _slices(len(rows)):
            metric.update(**{name: view[part] for name, view in given.items()})
        leaves = [
            torch.as_tensor(leaf, dtype=torch.float64).flatten().cpu()
            for leaf in tree_leaves(metric.compute())
            if isinstance(leaf, torch.Tensor | int | float)
        ]
        found = torch.cat([*leaves, torch.zeros(0, dtype=torch.float64)])
        return found.nan_to_num(_NOT_A_NUMBER, _INFINITE, -_INFINITE)


def _slices(samples: int) -> list[slice]:
    """Return consecutive parts of a shard, of different sizes; shards of odd size have one more."""
    parts = min(samples, _PARTS + samples % 2)
    ends = [samples * (n + 1) ** 2 // parts**2 for n in range(parts)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if end > begin]


class MetricWorkload(Workload):
    """Measures the table with a metric, which `make` creates."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the metric's result as a module, which is not trained."""
        return MetricModule(self._make, self._given)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with rate 0, because the result must not be trained."""
        return torch.optim.SGD(parameters, lr=0.0)


workload = Workload()
