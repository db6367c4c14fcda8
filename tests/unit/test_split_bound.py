"""The bound of sums that a model-parallel layout divides over ranks, beside values by hand."""

from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest

from distcheck.judge.oracles import full_batch_bound
from distcheck.records import TensorSpec
from distcheck.records.layers import IN_FLOAT32
from distcheck.records.mesh import Mesh

# Two modules with parameters, k - 1 additions between ranks in each, forward and backward.
BY_HAND = [(1, 0), (2, 2 * 2 * 1), (4, 2 * 2 * 3)]
SAMPLES, POSITIONS = 1, 1024  # few, so that the additions between ranks show in the bound


def a_step(tensor: int, *, data: int = 1) -> Any:
    shapes = {"0.weight": (8, 3), "0.bias": (8,), "3.weight": (10, 8)}
    return SimpleNamespace(
        specs=[TensorSpec(name=n, shape=s, dtype="float32") for n, s in shapes.items()],
        references=SimpleNamespace(mesh=Mesh((("data", data), ("tensor", tensor)))),
        full_batch=SimpleNamespace(positions=POSITIONS), shares=SimpleNamespace(samples=SAMPLES),
        full_batch_layer=IN_FLOAT32, module_scales={"0": 3.0, "3": 0.5},
    )  # fmt: skip


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize(("ranks", "splits"), BY_HAND)
def test_additions_between_ranks_by_hand(ranks: int, splits: int, data: int) -> None:
    assert full_batch_bound._splits(a_step(ranks, data=data)) == splits


def test_without_a_mesh_nothing_is_divided() -> None:
    step = a_step(2)
    step.references = SimpleNamespace(mesh=None)
    assert full_batch_bound._splits(step) == 0


@pytest.mark.parametrize(("ranks", "splits"), BY_HAND)
def test_the_bound_of_a_gradient_is_the_one_computed_by_hand(ranks: int, splits: int) -> None:
    of_layers = {0: (3.0, 8 * 3), 1: (3.0, 8), 2: (0.5, 10 * 8)}
    for index, (scale, elements) in of_layers.items():
        underflow = 2.0 * SAMPLES * 2.0**-149 * sqrt(elements)
        by_hand = 2.0**-24 * sqrt(SAMPLES * POSITIONS + splits) * scale + underflow
        assert full_batch_bound._relative_to_batch(a_step(ranks), index) == by_hand
