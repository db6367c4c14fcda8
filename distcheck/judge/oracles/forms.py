"""Forms of expectations: the frozen data that checks compare with. Nothing here compares or trains.

An oracle layer returns a form for each tensor, so a check is independent of the layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from distcheck.judge.oracles.compression import CompressedForm
from distcheck.judge.oracles.quantum import Unbiased
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shares import Shares
from distcheck.recordings.recording import Kind

Gradients = tuple[torch.Tensor | None, ...]  # by parameter; None for no gradient
Limit = Callable[[int], torch.Tensor | float]  # over every k-th number, or for the L2 norm


@dataclass(frozen=True)
class ExactBits:
    """Exactly these bits."""

    expected: torch.Tensor


@dataclass(frozen=True)
class ExactNumbers:
    """Exactly these numbers, but -0 equals +0."""

    expected: torch.Tensor


@dataclass(frozen=True)
class WithinBound:
    """Numbers within `bound` of `mean`, elementwise; float64."""

    mean: torch.Tensor
    bound: torch.Tensor
    nan_is_expected: bool = False


@dataclass(frozen=True)
class WithoutBias:
    """Numbers within a bound, whose errors are those of unbiased stochastic rounding."""

    within: WithinBound
    errors: Unbiased


@dataclass(frozen=True)
class WithinNorm:
    """Numbers within an L2 distance of `tolerance`. A larger distance of at most `rounding` is
    undecided: it may be rounding, for the reason `why`.
    """

    expected: torch.Tensor
    tolerance: float
    nan_is_expected: bool = False
    rounding: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class EitherForm:
    """Two forms, of which one must fit. If only the second fits, an `excuse` is reported. If
    neither fits, the error is measured by the first form with an excuse, or else by the second.
    """

    first: "Form"
    second: "Form"
    excuse: str = ""


Form = (
    ExactBits | ExactNumbers | WithinBound | WithinNorm | WithoutBias | CompressedForm | EitherForm
)


def with_positive_zero(value: float) -> torch.Tensor:
    """Return a tensor of numbers to compare, with +0 for -0."""
    return torch.tensor(value + 0.0, dtype=torch.float64)


After = Mapping[Kind, Sequence[Form | None]]


@dataclass(frozen=True)
class GradientForms(ABC):
    """The reduced gradients of a step, according to a layer.

    computed  [rank][parameter]: the ranks' recomputed local gradients; empty if all were recorded
    opening, closing   sentences reported before and after the comparisons
    excuse    sentence reported if nothing failed
    compresses   True if the forms of `of` are inputs of a compression
    """

    compresses = False
    shares: Shares
    computed: tuple[Gradients, ...]
    opening: str = field(default="", kw_only=True)
    closing: str = field(default="", kw_only=True)
    excuse: str = field(default="", kw_only=True)

    @abstractmethod
    def of(self, index: int) -> Form | None:
        """Return the form of a parameter's gradient; None if it has no gradient."""

    @abstractmethod
    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        """Return the bound that applies, given the ranks' `own` gradients of a parameter."""

    def every(self, index: int, stride: int) -> torch.Tensor | None:
        """Return every `stride`-th compared number, if bits are compared."""
        return None


@dataclass(frozen=True)
class TensorsOfEachRank:
    """Tensors of every rank separately: `parts` [rank][tensor]."""

    parts: tuple[tuple[Form | None, ...], ...]


@dataclass(frozen=True)
class RankLosses:
    """The loss of each rank."""

    forms: tuple[Form, ...]


@dataclass(frozen=True)
class ExpectedOutputs:
    """Outputs for each data coordinate's samples, [samples, numbers], and an L2 tolerance."""

    expected: tuple[WithinNorm, ...]


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss over all ranks: a form, or `expected` within `bound`; see `WithinNorm`."""

    form: Form
    expected: float
    bound: float
    rounding: float = 0.0
    remark: str = ""


@dataclass(frozen=True)
class InitialState:
    """A model as built: parameters and buffers."""

    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AllowedBuffers:
    """The allowed buffers of each rank after a step, with one or two alternatives."""

    ways: tuple[tuple[tuple[torch.Tensor, ...], ...], ...]
    shares: Shares


@dataclass(frozen=True)
class FullBatchBuffers:
    """Every rank's buffers after a step over the full batch. `alone` [rank][buffer] are the buffers
    of each of `ranks` after processing only its samples.
    """

    buffers: tuple[WithinNorm, ...]
    alone: tuple[tuple[torch.Tensor, ...], ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Combination:
    """A rank's tensor after ranks combined theirs: `found`, the sum of `weights` times `terms`, one
    for each rank, and of tensors that were known before.
    """

    found: Interval
    terms: tuple[torch.Tensor, ...] = ()
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class CombinedTensors:
    """Tensors `(kind, index)` that ranks combine after a step. `of` returns the expected tensor of
    each rank, None if it must be absent.
    """

    tensors: Sequence[tuple[Kind, int]]
    of: Callable[[Kind, int], Sequence[Combination | None]]


@dataclass(frozen=True)
class Agreement:
    """Groups of ranks that must hold the same parameter after a step, by index of the parameter."""

    groups: Sequence[Sequence[Sequence[int]]]
    remark: str


@dataclass(frozen=True)
class Updates:
    """Each rank's tensors after the optimizer step; None if the trace lacks the values before it.

    `holders` are the ranks that hold each sharded state tensor. Tensors in `combined` are combined
    afterward, and so differ from these.
    """

    after: tuple[After | None, ...]
    holders: Mapping[int, Sequence[int]]
    combined: Set[tuple[Kind, int]] = frozenset()


@dataclass(frozen=True)
class ExactParameters:
    """Parameters of workload `exact` after a step."""

    parameters: tuple[ExactNumbers, ...]


@dataclass(frozen=True)
class IndependentStep:
    """A step of the workload, independent of the strategy.

    Holds each rank's `own` gradients [parameter][rank], and properties of a separate model prepared
    for this step: trained parameters, training mode of all modules, number of calls, learning rates
    of groups. A property is empty or 0 if no declared event needs it.
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
