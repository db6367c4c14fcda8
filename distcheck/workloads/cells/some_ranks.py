"""Cells in which ranks are not alike: in what their samples reach, or in what they begin with."""

from collections.abc import Iterable

import torch
from torch import nn

from distcheck.records.expected_events import NoGradient, StartsApart, ZeroGradient
from distcheck.workloads.cells.samples import WIDTH, CellSamples, CellWorkload, Layers

_SIZE = 4096
_MARK = 8.0  # a pixel that only samples of the second half have
_BRANCH = 250  # wide, so that padding does not make gradients of different ranks equally long


class HalfMarked(CellSamples):
    """The second half of the samples is marked."""

    def mark(self, pixels: torch.Tensor, ids: torch.Tensor) -> None:
        """The second half."""
        pixels[ids >= _SIZE // 2] = _MARK


class _Divided(CellWorkload):
    """Marked samples go to the last rank, the others to all ranks but the last."""

    def samples(self) -> CellSamples:
        """Enough for a dozen steps of either kind."""
        return HalfMarked(_SIZE)

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> list[int]:
        """Position p of the epoch is rank p mod W's; what is used up gives way to the other half.

        Every rank makes the same list, of which it takes its own positions.
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
    """Marked samples go through one layer, the others through another; each layer is called on
    every rank, with no sample where there is none.
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
    """Marked samples go through one branch, the others through another, and in one step all go
    through a third: a branch without samples is not called, and has no gradient.

    Sizes differ, so code that exchanges just the gradients that it has does not exchange the wrong
    ones in silence: its collectives do not fit together, and it ends with an error.
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
    """One layer is used on the last rank alone, another on every rank but the last, and one in
    step 1 alone: what no sample reaches has no gradient.
    """

    must_happen = (
        NoGradient(parameter="of_one.weight", on="every rank but one"),
        NoGradient(parameter="of_others.0.weight", on="one rank"),
        NoGradient(parameter="late.weight", after_one=True),
    )
    layers = Experts

    def before_step(self, model: nn.Module, step: int) -> None:
        """One layer comes late, and goes again."""
        assert isinstance(model, Experts)
        model.uses_late = step == 1

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain SGD: a gradient of zero does what no gradient does, and code may fill in zeros."""
        return torch.optim.SGD(parameters, lr=0.05)


class ZeroOnSome(_Divided):
    """One layer has samples on the last rank alone, another on every rank but the last: what no
    sample reaches has a gradient of zero.
    """

    must_happen = (
        ZeroGradient(parameter="of_one.weight", on="every rank but one"),
        ZeroGradient(parameter="of_others.weight", on="one rank"),
    )
    layers = Branches


class Noted(Layers):
    """Keeps a note in a buffer, which takes no part in the loss."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("note", torch.zeros(3))


class DifferentStarts(CellWorkload):
    """Every rank but rank 0 has other parameters, and another buffer, than rank 0."""

    must_happen = (StartsApart(),)
    layers = Noted

    def hand_over(self, model: nn.Module, rank: int) -> None:
        """As a script does that sets no seed, or loads a checkpoint on rank 0 alone."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()) if rank else ():
                tensor.add_(rank)
