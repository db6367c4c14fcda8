"""Integer-valued training: every sum is exact, so every correct strategy must be bit-identical.

Inputs, weights and cotangents are small integers and every layer is piecewise linear, so each
gradient is a sum of integers that float32 represents exactly, in any summation order. The correct
gradient is then known in closed form. `distcheck.judge.oracles.integers` computes it without any
code of this module.

Three devices keep it exact over many steps:

- A parameter enters the loss through `v - v.detach()`: the gradient is v's, the value is 0. The
  values of the weights never enter the loss, which is a separate sum of integers.
- The learning rate is a power of two and there is no momentum.
- A mean over a shard of n = odd * 2^k samples is not exact. The loss is scaled by total / 2^k
  instead of 1 / n, as if the loss of each sample had the factor odd * total.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.errors import UsageError
from distcheck.workloads.datasets.synthetic import ComputedSamples

FEATURES, HIDDEN, IMAGE, CHANNELS, OUTPUTS = 12, 8, 4, 2, 4
HEAD_FEATURES = 6
TABLE = 300_007  # 1.2 MB in float32: more than one bucket, more than one ring segment
LEARNING_RATE = 2.0**-6

# Columns of a sample, in order: features, image, cotangents of each part, and its own loss.
WIDTHS = {
    "features": FEATURES,
    "image": IMAGE * IMAGE,
    "dense": HIDDEN,
    "head": OUTPUTS,
    "conv": CHANNELS,
    "scale": 1,
    "table": 1,
    "loss": 1,
}


def small_integers(row: torch.Tensor, column: torch.Tensor, span: int) -> torch.Tensor:
    """Return small pseudorandom integers in [-(span // 2), span // 2]: a square modulo 257."""
    t = (row * 131 + column * 71 + 17) % 257
    return (t * t) % 257 % span - span // 2


def _integers(count: int, column: int, span: int) -> torch.Tensor:
    """Return `mix` of that many rows, with period 257."""
    period = small_integers(torch.arange(257), torch.tensor(column), span).to(
        torch.get_default_dtype()
    )
    return period.repeat(-(-count // 257))[:count]


class IntegerModel(nn.Module):
    """A dense layer, a linear head, a convolution, one scalar, and one large vector."""

    def __init__(self, scalar_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.dense = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HEAD_FEATURES, OUTPUTS, bias=False)
        self.conv = nn.Conv2d(1, CHANNELS, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(scalar_shape))
        self.table = nn.Parameter(torch.empty(TABLE))
        self.pattern = _integers(TABLE, 6, 7)  # a constant, not a buffer: it is not updated
        for column, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(_integers(parameter.numel(), column, 3).view(parameter.shape))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [n, columns] -> the loss of each sample [n], an integer."""
        part = dict(zip(WIDTHS, inputs.split(list(WIDTHS.values()), dim=1), strict=True))
        image = part["image"].view(-1, 1, IMAGE, IMAGE)
        hidden = F.relu(self.dense(part["features"]))
        outputs = self.head(F.relu(part["features"][:, :HEAD_FEATURES]))
        maps = F.relu(self.conv(image)).sum((2, 3))
        table = (_only_gradient(self.table) * self.pattern.to(inputs)).sum()
        per_sample: torch.Tensor = (
            part["loss"][:, 0]
            + (_only_gradient(hidden) * part["dense"]).sum(1)
            + (_only_gradient(outputs) * part["head"]).sum(1)
            + (_only_gradient(maps) * part["conv"]).sum(1)
            + _only_gradient(self.scale) * part["scale"][:, 0]
            + table * part["table"][:, 0]
        )
        return per_sample


def _only_gradient(value: torch.Tensor) -> torch.Tensor:
    return value - value.detach()


class IntegerSamples(ComputedSamples):
    """Sample i, column j is `mix(i, j)`: cotangents in -1..1, all other columns in -2..2.

    The cotangents of the scalar and the large vector are in 1..3, so that their gradients, which
    are single sums over the samples, can never be zero.
    """

    shape = (sum(WIDTHS.values()),)
    classes = 1

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [n, columns] and labels [n], all zero."""
        rows = (ids if train else ids + self.size(train=True)).unsqueeze(1)
        start, columns = 0, []
        for name, width in WIDTHS.items():
            span = 5 if name in ("features", "image", "loss") else 3
            lift = 2 if name in ("scale", "table") else 0
            columns.append(small_integers(rows, torch.arange(start, start + width), span) + lift)
            start += width
        return torch.cat(columns, 1).to(dtype), torch.zeros_like(ids)


class Exact:
    """The workload; see the module's docstring."""

    def __init__(self, scalar_shape: tuple[int, ...] = ()) -> None:
        self._scalar_shape = scalar_shape

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build a model with the same integers, whatever the seed."""
        return IntegerModel(self._scalar_shape)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the shard's scaled sum of losses: a mean except for an exact factor."""
        per_sample: torch.Tensor = model(batch.inputs)
        samples = len(batch.ids)
        power_of_two = samples & -samples
        return per_sample.sum() * (batch.total / power_of_two)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)

    def samples(self) -> IntegerSamples:
        return IntegerSamples()


workload = Exact()


def described(words: str) -> Exact:
    """Return the variant `no-scalar`, for code without scalars (0-d). Raises UsageError."""
    if words != "no-scalar":
        raise UsageError(f"workload exact:{words} is unknown; known is exact:no-scalar")
    return Exact((1,))
