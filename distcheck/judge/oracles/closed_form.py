"""Layer `exact`: the closed form of workload `exact`, and expectations after rounded sums.

Code that promises no order may divide before it adds, or keep a running mean. A quotient that is
not a dyadic fraction rounds, and the sum of integers does not; only the rounding bound allows this.
From the first such step on, the closed form describes a different training, and expectations start
from recorded state: the shards' gradients, the loss and the update bitwise (bitwise), the mean
within the rounding bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch

from distcheck.judge.oracles import bitwise, rounding_bound, unpromised
from distcheck.judge.oracles.forms import (
    EitherForm,
    ExactBits,
    ExactNumbers,
    ExactParameters,
    Form,
    GradientForms,
    Limit,
    RankLosses,
    TensorsOfEachRank,
    Updates,
    with_positive_zero,
)
from distcheck.judge.oracles.integers import IntegerOracle, IntegerStep, expand_parameter
from distcheck.judge.oracles.references import AtStep, References
from distcheck.judge.oracles.rounding_bound import RoundingBound
from distcheck.judge.oracles.shares import declared_factor
from distcheck.machine.numerics import every_nth_number
from distcheck.recordings.recording import Kind
from distcheck.records import TensorSpec

Standing = Literal["exact", "rounded", "wrong"]
# Derived: relative to a sum of absolute values, if bits are compared; 2^13 u of float64 covers the
# roundings of 8,000 ranks.
_EXACT = 2.0**-40
_ROUNDED = (
    "sums are rounded, within the bound of rounding for any order: exact sums are required only of "
    "code that promises an order"
)


class ClosedForm:
    """The integer-valued training of one case from its start. Steps are kept, since later steps
    depend on them. Results do not depend on the order of queries.
    """

    def __init__(self, references: References) -> None:
        self._at, self._references = references.at(0), references
        self._oracle = IntegerOracle(references.contract, self._at.case.dtype)
        self._steps: list[IntegerStep] = []
        self._standings: dict[int, Standing] = {}

    def step(self, step: int) -> IntegerStep:
        """Return the exact values of a step. Raises HeadroomError."""
        trace, loss = self._at.trace, self._at.contract.loss_given(self._at.case.loss)
        while len(self._steps) <= step:
            done = len(self._steps)
            headers = [trace.header(rank, done) for rank in range(trace.layout.world)]
            ids = [header.ids for header in headers]
            sizes = list(map(len, ids))
            declared = [declared_factor(loss, n, sum(sizes), len(sizes)) for n in sizes]
            factors = [h.loss_factor * d for h, d in zip(headers, declared, strict=True)]
            self._steps.append(self._oracle.step(ids, factors))
        return self._steps[step]

    def standing(self, step: int) -> Standing:
        """Classify the gradients up to a step: exact integers, within the rounding bound from some
        step on, or neither. With a promised order, they are never "rounded".
        """
        if self._at.contract.order is not None:
            return "wrong"
        before: Standing = "exact"
        for earlier in range(step + 1):
            if earlier not in self._standings:
                self._standings[earlier] = self._look(earlier, before)
            before = self._standings[earlier]
            if before == "wrong":
                break
        return before

    def began_rounded(self, step: int) -> bool:
        """Return True if sums had been rounded before this step."""
        return step > 0 and self.standing(step - 1) == "rounded"

    def is_rounded_at(self, step: int) -> bool:
        """Return True if sums of a step are rounded, and this and all earlier steps are right."""
        self.standing(step)
        return self._standings.get(step) == "rounded"

    def _look(self, step: int, before: Standing) -> Standing:
        if before == "exact" and self._all_exact(step):
            return "exact"
        mean = rounding_bound.mean_of_step(self._references.at(step))
        for index in range(len(self._at.specs)):
            interval = mean.interval(index)
            tolerance = mean.near[index] if mean.near else 0.0
            for result in self._results(step, index):
                if result is None or interval is None:
                    return "wrong"
                apart = (result.double() - interval.mean).abs()
                if not (bool((apart <= interval.bound).all()) or float(apart.norm()) <= tolerance):
                    return "wrong"
        return "rounded"

    def _all_exact(self, step: int) -> bool:
        for index, spec in enumerate(self._at.specs):
            expected = tensor_from_exact_values(spec, self.step(step).synced[spec.name])
            for result in self._results(step, index):
                if result is None or not torch.equal(result, expected):
                    return False
        return True

    def _results(self, step: int, index: int) -> list[torch.Tensor | None]:
        trace = self._at.trace
        ranks = range(trace.layout.world)
        return [trace.tensor(rank, Kind.GRADIENT, step, index) for rank in ranks]


@dataclass(frozen=True)
class ExactGradients(GradientForms):
    """Mean gradients of workload `exact`; rounded sums may be within the bound of `mean`."""

    specs: tuple[TensorSpec, ...]
    exact: IntegerStep
    mean: RoundingBound | None

    def of(self, index: int) -> Form:
        spec = self.specs[index]
        exact = ExactNumbers(tensor_from_exact_values(spec, self.exact.synced[spec.name]))
        mean = None if self.mean is None else self.mean.of(index)
        return exact if mean is None else EitherForm(exact, mean)

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        """Return the rounding bound if sums are rounded, or else the rounding of float64."""
        if self.mean is not None:
            return self.mean.limit(index, own)

        def elementwise(stride: int) -> torch.Tensor:
            pairs = zip(self.shares.mean_weights, own, strict=True)
            sizes = [abs(share) * every_nth_number(stride, g).double().abs() for share, g in pairs]
            return torch.stack(sizes).sum(0) * _EXACT

        return elementwise


def tensor_from_exact_values(spec: TensorSpec, values: Sequence[Fraction]) -> torch.Tensor:
    """Return a tensor like `spec` with these values, which its dtype represents exactly."""
    floats = torch.frombuffer(expand_parameter(spec.name, values), dtype=torch.float64)
    return floats.to(getattr(torch, spec.dtype)).view(spec.shape)


def gradients(at: AtStep) -> ExactGradients:
    """Return the reduced gradients of a step. Raises HeadroomError."""
    form, step = at.references.kept(ClosedForm), at.step
    return ExactGradients(
        at.shares,
        at.recomputed_if_unrecorded,
        specs=at.specs,
        exact=form.step(step),
        mean=rounding_bound.mean_of_step(at) if _rounds(at) else None,
        excuse=_ROUNDED if form.is_rounded_at(step) else "",
    )


def local_gradients(at: AtStep) -> TensorsOfEachRank:
    """Return every rank's local gradients. Raises HeadroomError."""
    form = at.references.kept(ClosedForm)
    exact = form.step(at.step)
    parts: list[list[Form]] = [
        [ExactNumbers(tensor_from_exact_values(spec, own[spec.name])) for spec in at.specs]
        for own in exact.local
    ]
    if form.began_rounded(at.step) or at.references.unpromised:
        again = bitwise.local_gradients(at).parts
        parts = [
            [
                one if other is None else EitherForm(one, other)
                for one, other in zip(*pair, strict=True)
            ]
            for pair in zip(parts, again, strict=True)
        ]
    return TensorsOfEachRank(tuple(map(tuple, parts)))


def loss(at: AtStep) -> RankLosses:
    """Return the loss of every rank's shard. Raises HeadroomError."""
    form = at.references.kept(ClosedForm)
    losses = form.step(at.step).losses
    exact: tuple[Form, ...] = tuple(ExactBits(with_positive_zero(float(value))) for value in losses)
    if at.references.unpromised:  # micro-batches may not be representable fractions
        again = (ExactBits(with_positive_zero(shard.loss)) for shard in at.shards)
        return unpromised.loss_forms(
            at, [EitherForm(*pair) for pair in zip(again, exact, strict=True)]
        )
    if form.began_rounded(at.step):
        pairs = zip(exact, bitwise.loss(at).forms, strict=True)
        exact = tuple(EitherForm(*pair) for pair in pairs)
    return RankLosses(exact)


def parameters(at: AtStep) -> ExactParameters | Updates:
    """Return the parameters after a step: exact as long as gradients were exact, then the update of
    the recorded state. Raises HeadroomError.
    """
    if _rounds(at):
        return bitwise.parameters(at)
    after = at.references.kept(ClosedForm).step(at.step).after
    return ExactParameters(
        tuple(ExactNumbers(tensor_from_exact_values(s, after[s.name])) for s in at.specs)
    )


def _rounds(at: AtStep) -> bool:
    """Return True if sums are rounded in this step or an earlier one."""
    form = at.references.kept(ClosedForm)
    return form.standing(at.step) == "rounded" or form.began_rounded(at.step)
