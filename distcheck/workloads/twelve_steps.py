"""A tiny floating-point model that is trained for twelve steps, for errors that begin late.

Compression after a warm-up, a mask, or a switch may begin at any step, and integer-valued training
may not reveal them. A step of this model is very cheap, so there are twelve.

Its gradients have two features that most models lack:

- `down` is zero on every rank at the first step, because `up` starts at zero as in LoRA: code may
  divide zero by zero
- `large` and `small` have large and subnormal gradients, which code may clamp or flush. Their terms
  add zero to the loss, which they would otherwise dominate
"""

from collections.abc import Iterable

import torch
from torch import nn

from distcheck.machine.numerics import smallest
from distcheck.workloads.cells.samples import FEATURES, CellSamples, CellWorkload

WIDTH, RANK, USED = 16, 2, 8  # USED: numbers of a sample in the unusual terms
# Factors of 1 and of the smallest subnormal. Gradients become 1e-2 of that: 1e4, within float16.
LARGE, SMALL = 2.0**19, 2.0**26


class Model(nn.Module):
    """inputs [n, 3, 8, 8] -> logits [n, classes]: one hidden layer, and the unusual terms."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH, bias=False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)
        self.last = nn.Linear(WIDTH, classes)
        self.large, self.small = (nn.Parameter(torch.zeros(USED)) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits. The unusual terms are zero, and added to the first logit only: a term
        of all logits would not change the loss.
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
    """The model on the samples of cells."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Model(classes)

    def samples(self) -> CellSamples:
        """Return enough samples for twelve batches without repetition."""
        return CellSamples(1 << 12)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)


workload = Workload()
