"""full batch float32 knows how long the sums of a workload are; those of the built-in ones are as
ever.
"""

from math import sqrt

import msgspec
import pytest
import torch
from torch import nn

from distcheck.judge.oracles.full_batch import relative_tolerance
from distcheck.judge.oracles.longest_sum import LongestSum
from distcheck.records import Case
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64
from distcheck.training.building import open_ingredients

LEAST = 32 * 32
PER_STEP = 5


class Twice(nn.Module):
    """A layer that is called once for each of two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [n, 2 t, 3] -> [n, t, 7]."""
        one, two = inputs.chunk(2, dim=1)
        return self.layer(one) + self.layer(two)


class Ids(nn.Embedding):
    """Of numbers in place of tokens."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input.long()[..., 0].abs() % 4)


@pytest.mark.parametrize(
    ("model", "shape", "terms"),
    [
        (nn.Conv1d(3, 8, 9, padding=4), (3, 65_536), 65_536),
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), (3, 32, 32), 256),
        (nn.ConvTranspose1d(3, 2, 4, stride=4), (3, 100), 100),
        (nn.Linear(3, 5), (3,), 1),
        (nn.Linear(3, 5), (PER_STEP, 3), PER_STEP),
        (nn.RNN(3, 8, batch_first=True), (2048, 3), 2048),
        (nn.LSTM(3, 8, bidirectional=True, batch_first=True), (70, 3), 70),
        (nn.BatchNorm1d(3), (3, 50), 50),
        (nn.GroupNorm(1, 3), (3, 50), 50),
        (nn.LayerNorm(3), (60, 3), 60),
        (nn.BatchNorm1d(3, affine=False), (3, 50), 0),
        (Ids(4, 6), (40, 3), 40),
        (Twice(), (20, 3), 20),
        (nn.Flatten(), (20, 3), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_one_sample_has_its_terms(model: nn.Module, shape: tuple[int, ...], terms: int) -> None:
    for samples in (1, 6):
        with LongestSum(model, samples) as counted:
            model(torch.ones(samples, *shape))
        assert counted.terms == terms
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("workload", ["mlp", "cnn", "composite", "vgg11"])
def test_no_sum_of_a_built_in_workload_is_longer_than_was_measured(workload: str) -> None:
    asked = {"strategy": "allreduce", "world": 2, "batch": 4, "steps": 1, "dtype": "float32"}
    case = msgspec.convert({"id": "one", "workload": workload, **asked}, Case)
    ingredients = open_ingredients(case, b"", None)
    model, batch = ingredients.model(), ingredients.batch(torch.arange(4), 4)
    with LongestSum(model, 4) as counted:
        ingredients.loaded.workload.loss(model, batch)
    assert 0 < counted.terms <= LEAST
    for layer, at_256 in ((IN_FLOAT32, 2.0**-24 * sqrt(256 * LEAST)), (IN_FLOAT64, 1e-11)):
        assert relative_tolerance(layer, 256, counted.terms) == at_256


def test_longer_sums_have_more_and_no_more_than_their_root() -> None:
    usual = relative_tolerance(IN_FLOAT32, 256)
    assert relative_tolerance(IN_FLOAT32, 256, 64 * LEAST) == 8 * usual
    assert relative_tolerance(IN_FLOAT64, 256, 64 * LEAST) == 1e-11
    assert relative_tolerance(IN_FLOAT64, 2**20, 2**20) == 2.0**-53 * 2.0**20


def test_additions_between_ranks_count() -> None:
    whole = relative_tolerance(IN_FLOAT32, 256)
    split = relative_tolerance(IN_FLOAT32, 256, splits=3 * 256 * LEAST)
    assert split == 2 * whole
