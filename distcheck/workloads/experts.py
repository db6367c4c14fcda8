"""A mixture-of-experts layer with top-1 routing, which expert parallelism shards.

A gate selects one expert for each sample, and the expert's output is multiplied by the gate's
probability, so that the gate has a gradient as well.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.workloads.cells.samples import Classifier

WIDTH, EXPERTS = 32, 8


class Experts(nn.Module):
    """[n, width] -> [n, width]: each row passes through the expert that the gate selects for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert [n] and its probability [n] for each row."""
        probabilities = F.softmax(self.gate(rows), dim=1)
        chosen = probabilities.argmax(1)
        return chosen, probabilities.gather(1, chosen.unsqueeze(1)).squeeze(1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen, probability = self.choose(rows)
        answers = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            answers = answers.index_add(0, mine, expert(rows[mine]))
        return answers * probability.unsqueeze(1)


class Workload(Classifier):
    """A linear layer, the experts with a residual connection, a linear layer; SGD with momentum."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Model(prod(sample_shape), classes)


class Model(nn.Module):
    """inputs [n, *sample shape] -> logits [n, classes]."""

    def __init__(self, numbers: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(numbers, WIDTH)
        self.mixture = Experts()
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = self.enter(inputs.flatten(1))
        logits: torch.Tensor = self.head(rows + self.mixture(rows))
        return logits


workload = Workload()
