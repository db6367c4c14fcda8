"""What a tensor may be: the frozen data that checks compare with. Nothing here compares or trains.

An oracle layer answers with one of these for each tensor, so a check need not know which layer it
is judging by.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from distcheck.judge.oracles.low_rank import Projection
from distcheck.judge.oracles.shares import Shares
from distcheck.recordings.recording import Kind

Gradients = tuple[torch.Tensor | None, ...]  # of every parameter; None where there is none
Limit = Callable[[int], torch.Tensor | float]  # over every k-th number, or for the L2 norm


@dataclass(frozen=True)
class Bits:
    """These bits."""

    expected: torch.Tensor


@dataclass(frozen=True)
class Numbers:
    """These numbers: -0 is +0."""

    expected: torch.Tensor


@dataclass(frozen=True)
class Within:
    """A number within `bound` of `mean`, elementwise; float64."""

    mean: torch.Tensor
    bound: torch.Tensor
    nan_is_expected: bool = False


@dataclass(frozen=True)
class Near:
    """Numbers whose difference from these has an L2 norm of at most `tolerance`. One of at most
    `rounding` may be rounding alone, for which `why` is the reason, and decides nothing.
    """

    expected: torch.Tensor
    tolerance: float
    nan_is_expected: bool = False
    rounding: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Either:
    """The first of two, or else the second. An `excuse` is said where the second alone fits; what
    fits neither is then measured by the first, and without an excuse by the second.
    """

    first: "Form"
    second: "Form"
    excuse: str = ""


Form = Bits | Numbers | Within | Near | Projection | Either


def number(value: float) -> torch.Tensor:
    """A number that is compared, -0 as +0."""
    return torch.tensor(value + 0.0, dtype=torch.float64)


After = Mapping[Kind, Sequence[Form | None]]


@dataclass(frozen=True)
class GradientForms(ABC):
    """What the synchronized gradients of a step may be, as a layer answers.

    `computed` [rank][parameter] are the ranks' own gradients, computed again; empty where all were
    recorded. `opening` and `closing` are said of the step in the report, before and after what the
    comparisons say; `excuse` where nothing failed. `projects`: what `of` gives are projections.
    """

    projects = False
    shares: Shares
    computed: tuple[Gradients, ...]
    opening: str = field(default="", kw_only=True)
    closing: str = field(default="", kw_only=True)
    excuse: str = field(default="", kw_only=True)

    @abstractmethod
    def of(self, index: int) -> Form | None:
        """What a parameter's gradient may be; None where it has none."""

    @abstractmethod
    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        """The bound in force, in terms of the ranks' `own` gradients of a parameter."""

    def every(self, index: int, stride: int) -> torch.Tensor | None:
        """Every so-many-th number of what is compared, where bits are: then `limit` is only how far
        a mistaken sum may be from its exact value.
        """
        return None


@dataclass(frozen=True)
class EachItsOwn:
    """Tensors of every rank by itself: `parts` [rank][tensor]."""

    parts: tuple[tuple[Form | None, ...], ...]


@dataclass(frozen=True)
class RankLosses:
    """What the loss of each rank may be; `expected` and `bound` are what a picture shows of it."""

    forms: tuple[Form, ...]
    expected: tuple[float, ...]
    bound: float = 0.0


@dataclass(frozen=True)
class Outputs:
    """What a model returns for the samples of each data coordinate, [samples, numbers], and how far
    it may be off, as an L2 norm.
    """

    expected: tuple[Near, ...]


@dataclass(frozen=True)
class MeanLoss:
    """What the mean loss over all ranks may be: `expected` within `bound`, or what else the form
    has. `rounding` as in `Near`; `remark` is said in the report.
    """

    form: Form
    expected: float
    bound: float
    rounding: float = 0.0
    remark: str = ""


@dataclass(frozen=True)
class InitialState:
    """A model as it was built: parameters and buffers."""

    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class BufferWays:
    """Of each rank, what its buffers may be after a step: one way, or two."""

    ways: tuple[tuple[tuple[torch.Tensor, ...], ...], ...]
    shares: Shares


@dataclass(frozen=True)
class AfterBatch:
    """What every rank's buffers may be after a step over the whole batch; `alone` [rank][buffer] is
    what each of `ranks` leaves there by its own samples.
    """

    buffers: tuple[Near, ...]
    alone: tuple[tuple[torch.Tensor, ...], ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Averaged:
    """Of each rank, the parameters that its own update leaves: what is averaged."""

    parts: tuple[Gradients, ...]


@dataclass(frozen=True)
class Updates:
    """Of each rank, what its tensors may be after the optimizer's step; None where the trace lacks
    what that starts from. `holders` are the ranks that hold each tensor of its state that is
    divided among them; `averaged` says that parameters are averaged afterwards, and are not these.
    """

    after: tuple[After | None, ...]
    holders: Mapping[int, Sequence[int]]
    averaged: bool = False


@dataclass(frozen=True)
class ExactParameters:
    """The lattice's parameters after a step."""

    parameters: tuple[Numbers, ...]


@dataclass(frozen=True)
class OwnStep:
    """A step as the workload has it, whatever a strategy does. Each rank's `own` gradients
    [parameter][rank], and of a model of the workload's own, prepared as for this step: which
    parameters train, whether all modules are in training mode, how often it is called, the groups'
    learning rates; empty or 0 where no event that is declared needs it.
    """

    own: tuple[Gradients, ...]
    trains: Mapping[str, bool]
    training_mode: bool
    calls: int
    rates: tuple[float | None, ...]
    starts_alike: bool
    twice_named: Set[str]
    in_one_storage: Set[str]
    kinds: Set[str]
