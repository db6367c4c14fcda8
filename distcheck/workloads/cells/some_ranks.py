"""Cells in which ranks differ: in the layers that their samples use, or in initial parameters."""

from collections.abc import Iterable

import torch
from torch import nn

from distcheck.records.expected_events import InitialParametersDiffer, NoGradient, ZeroGradient
from distcheck.workloads.cells.samples import WIDTH, CellSamples, CellWorkload, Layers

_SIZE = 4096
_MARK = 8.0  # a pixel value of samples in the second half only
_BRANCH = 250  # wide, so that padding does not make gradients of different ranks equally long


class HalfMarked(CellSamples):
    """Samples with a mark on the second half."""

    def mark(self, pixels: torch.Tensor, ids: torch.Tensor) -> None:
        pixels[ids >= _SIZE // 2] = _MARK


class _Divided(CellWorkload):
    """Marked samples go to the last rank, the others to all ranks but the last."""

    def samples(self) -> CellSamples:
        """Return enough samples for a dozen steps of either kind."""
        return HalfMarked(_SIZE)

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> list[int]:
        """Return a rank's samples: position p of the epoch belongs to rank p mod W. Once one half
        is used up, the other replaces it. Every rank computes the same list, and takes its own
        positions.
        """
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(size, generator=generator).tolist()
        marked = [sample for sample in order if sample >= size // 2]
        others = [sample for sample in order if sample < size // 2]
        dealt = []
        for position in range(size):
            wanted, rest = (marked, others) if position % world == world - 1 else (others, marked)
            dealt.append((wanted or rest).pop())
        return dealt[rank::world]


class Branches(Layers):
    """Marked samples use one layer, and all other samples a second layer. Each layer is called on
    every rank, possibly without samples.
    """

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.of_one = nn.Linear(WIDTH, classes)
        self.of_others = nn.Linear(WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.inputs(inputs.flatten(1)).tanh()).tanh()
        logits: torch.Tensor = self.outputs(hidden)
        is_marked = inputs[:, 0, 0, 0] == _MARK
        for layer, chosen in ((self.of_one, is_marked), (self.of_others, ~is_marked)):
            rows = chosen.nonzero().flatten()
            logits = logits.index_add(0, rows, layer(hidden[rows]))
        return logits


class Experts(Layers):
    """Marked samples use one branch, and all other samples a second; in one step, all samples use a
    third. A branch without samples is not called, and has no gradient.

    Sizes differ, so code that synchronizes only the existing gradients fails with an error: its
    collectives do not match.
    """

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.of_one = nn.Linear(WIDTH, classes, bias=False)
        self.of_others = nn.Sequential(
            nn.Linear(WIDTH, _BRANCH), nn.Tanh(), nn.Linear(_BRANCH, classes, bias=False)
        )
        self.uses_late = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.inputs(inputs.flatten(1)).tanh()).tanh()
        if self.uses_late:
            hidden = hidden + self.late(hidden).tanh()
        logits: torch.Tensor = self.outputs(hidden)
        is_marked = inputs[:, 0, 0, 0] == _MARK
        for branch, chosen in ((self.of_one, is_marked), (self.of_others, ~is_marked)):
            rows = chosen.nonzero().flatten()
            if len(rows):
                logits = logits.index_add(0, rows, branch(hidden[rows]))
        return logits


class AbsentOnSome(_Divided):
    """One layer is used on the last rank only, one on every rank but the last, and one in step 1
    only. A layer without samples has no gradient.
    """

    must_happen = (
        NoGradient(parameter="of_one.weight", on="every rank but one"),
        NoGradient(parameter="of_others.0.weight", on="one rank"),
        NoGradient(parameter="late.weight", after_one=True),
    )
    layers = Experts

    def before_step(self, model: nn.Module, step: int) -> None:
        """Use one layer in step 1 only."""
        assert isinstance(model, Experts)
        model.uses_late = step == 1

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD: a zero gradient has the same effect as none, so code may use zeros."""
        return torch.optim.SGD(parameters, lr=0.05)


class ZeroOnSome(_Divided):
    """Layers without samples on some ranks, so that their gradients are zero there."""

    must_happen = (
        ZeroGradient(parameter="of_one.weight", on="every rank but one"),
        ZeroGradient(parameter="of_others.weight", on="one rank"),
    )
    layers = Branches


class LayersWithBuffer(Layers):
    """Layers with a buffer that does not affect the loss."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("note", torch.zeros(3))


class DifferentStarts(CellWorkload):
    """Every rank except rank 0 starts with different parameters and a different buffer."""

    must_happen = (InitialParametersDiffer(),)
    layers = LayersWithBuffer

    def hand_over(self, model: nn.Module, rank: int) -> None:
        """Change the model on all ranks but rank 0, like a script without a seed."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()) if rank else ():
                tensor.add_(rank)
