"""A tiny model of real numbers that is trained for twelve steps: errors that begin late.

Compression after a warm-up, a mask, a switch: these may begin at any step, and whole numbers need
not show them. A step of this model costs next to nothing, so there are twelve of them.

Its gradients have what those of most models lack:

- `down` is zero on every rank at the first step, since `up` begins at zero as in LoRA: code may
  divide zero by zero
- `large` and `small` have large and subnormal ones, which code may clamp or flush. Their terms add
  nothing to the loss, which would otherwise be nothing else
"""

from collections.abc import Iterable

import torch
from torch import nn

from distcheck.machine.numerics import smallest
from distcheck.workloads.cells.samples import FEATURES, CellSamples, CellWorkload

WIDTH, RANK, USED = 16, 2, 8  # USED: numbers of a sample that the unusual terms are made of
# Of one, and of the smallest number. Gradients become 1e-2 of that: 1e4, which float16 holds.
LARGE, SMALL = 2.0**19, 2.0**26


class Model(nn.Module):
    """inputs [n, 3, 8, 8] -> logits [n, classes]: one hidden layer, and what is added to it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH, bias=False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)
        self.last = nn.Linear(WIDTH, classes)
        self.large, self.small = (nn.Parameter(torch.zeros(USED)) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The unusual terms are zero, and belong to the first logit: a term of all logits would
        leave the loss as it is.
        """
        numbers = inputs.flatten(1)
        hidden = torch.tanh(self.first(numbers))
        logits: torch.Tensor = self.last(hidden + self.up(self.down(hidden)))
        term = logits.new_zeros(())
        for weight, size in ((self.large, LARGE), (self.small, SMALL * smallest(inputs.dtype))):
            one = numbers[:, :USED] @ weight
            term = term + (one - one.detach()) * size
        return torch.cat([logits[:, :1] + term.unsqueeze(1), logits[:, 1:]], dim=1)


class Workload(CellWorkload):
    """On the samples of cells."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Model(classes)

    def samples(self) -> CellSamples:
        """Enough for twelve batches without one twice."""
        return CellSamples(1 << 12)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD, learning rate 0.05."""
        return torch.optim.SGD(parameters, lr=0.05)


workload = Workload()
