"""The bounds that two runs of a case are held against: those of negated losses, too."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from distcheck.compare.traces import StepBounds
from distcheck.contract import Contract, Training
from distcheck.recordings.traces.reader import TraceReader


def bounds(factors: tuple[float, ...], dtype: torch.dtype = torch.float32) -> StepBounds:
    """Of one step and parameter; each rank multiplied its loss by a factor of its own."""
    left = [f * torch.arange(1.0, 5.0, dtype=dtype) for f in factors]
    trace = SimpleNamespace(
        layout=SimpleNamespace(
            world=len(factors), model=SimpleNamespace(parameters=[SimpleNamespace(name="0.weight")])
        ),
        header=lambda rank, step: SimpleNamespace(
            ids=(0, 1), loss_count=2, loss=1.0, loss_factor=factors[rank]
        ),
        tensor=lambda rank, kind, step, index: left[rank],
        tensors=lambda rank, kind, step: [left[rank]],
    )
    trace.of_ranks = lambda ranks: trace
    job = SimpleNamespace(
        case=SimpleNamespace(with_data=tuple(range(len(factors))), dtype="float32", loss="mean"),
        contracts=(Contract(), Contract()),
        training=Training(),
    )
    return StepBounds(cast("Any", job), cast("TraceReader", trace), 0)


@pytest.mark.parametrize("negated", [(-1.0, -1.0), (-1.0, 1.0)])
def test_a_negated_loss_is_held_against_what_any_other_is(negated: tuple[float, float]) -> None:
    for same_inputs in (True, False):
        plain = bounds((2.0, 2.0)).synced(0, same_inputs=same_inputs)
        found = bounds((2 * negated[0], 2 * negated[1])).synced(0, same_inputs=same_inputs)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(plain))
        assert bool((torch.as_tensor(found) > 0).all())


def test_a_loss_that_was_multiplied_by_zero_allows_nothing() -> None:
    assert not bool(torch.as_tensor(bounds((0.0, 1.0)).synced(0, same_inputs=True)).any())
    assert math.isnan(cast("float", bounds((0.0, 1.0)).synced(0, same_inputs=False)))


def test_of_too_many_roundings_none_is_known() -> None:
    for world, known in ((100, True), (200, False), (300, False)):
        found = bounds((1.0,) * world, torch.bfloat16).synced(0, same_inputs=True)
        assert (found is not None) == known
