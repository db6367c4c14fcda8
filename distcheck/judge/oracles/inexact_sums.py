"""Whether sums that the lattice would have exact were rounded on the way, and by no more than R.

Code that promises no order may divide before it adds up, or keep a running mean: a quotient that is
not a dyadic fraction rounds where the lattice's sum would not. R allows that anywhere else. From
the first such step on, the lattice's closed form describes another training, and what is expected
starts from the state that was recorded: the shards' gradients, the loss and the update to the bit
(X), the mean within R.
"""

from typing import TYPE_CHECKING, Literal

import torch

from distcheck.judge.oracles.lattice_tensors import as_tensor
from distcheck.training.traces.layout import Kind

if TYPE_CHECKING:
    from distcheck.judge.oracles.expectation import StepExpectation

Standing = Literal["exact", "rounded", "wrong"]


def standing(expectation: "StepExpectation") -> Standing:
    """What the gradients of a step, and of all before it, are: the lattice's own numbers; within R
    from some step on; or neither. Where an order is promised, they are never "rounded".
    """
    if expectation.contract.order is not None:
        return "wrong"
    before: Standing = "exact"
    for step in range(expectation.step + 1):
        before = _at(expectation.at(step), before)
        if before == "wrong":
            break
    return before


def began_rounded(expectation: "StepExpectation") -> bool:
    """Whether a step's ranks began it where sums had been rounded before."""
    step = expectation.step
    return step > 0 and standing(expectation.at(step - 1)) == "rounded"


def exact_gradient(expectation: "StepExpectation", index: int) -> torch.Tensor:
    """The lattice's mean gradient of one parameter."""
    spec = expectation.trace.layout.model.parameters[index]
    return as_tensor(spec, expectation.lattice.synced[spec.name])


def _at(expectation: "StepExpectation", before: Standing) -> Standing:
    known = expectation.standings
    if expectation.step not in known:
        exact = before == "exact" and _all_exact(expectation)
        known[expectation.step] = "exact" if exact else _rounded_or_wrong(expectation)
    return known[expectation.step]


def _results(expectation: "StepExpectation", index: int) -> list[torch.Tensor | None]:
    trace, step = expectation.trace, expectation.step
    return [trace.tensor(r, Kind.GRADIENT, step, index) for r in range(trace.layout.world)]


def _all_exact(expectation: "StepExpectation") -> bool:
    for index in range(len(expectation.trace.layout.model.parameters)):
        expected = exact_gradient(expectation, index)
        for found in _results(expectation, index):
            if found is None or not torch.equal(found, expected):
                return False
    return True


def _rounded_or_wrong(expectation: "StepExpectation") -> Standing:
    for index in range(len(expectation.trace.layout.model.parameters)):
        interval = expectation.interval(index)
        for found in _results(expectation, index):
            if found is None or interval is None:
                return "wrong"
            if not bool(((found.double() - interval.mean).abs() <= interval.bound).all()):
                return "wrong"
    return "rounded"
