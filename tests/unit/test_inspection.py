"""What is found out about a workload before it runs, and what bears no close look."""

import warnings

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from distcheck.testing import reused_worlds
from distcheck.verification.inspection import inspect_workload
from distcheck.workloads.cells.samples import FEATURES, CellWorkload
from tests.unit.test_full_batch import opened


class Conditional(nn.Module):
    """A branch as compilers want it, and then a shorter dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(FEATURES, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1)
        chosen = torch.cond(flat.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (flat,))
        return self.only(chosen).bfloat16().float()


class Branching(CellWorkload):
    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Conditional()


class Alone(nn.Linear):
    """As compiled code that puts up with nobody who looks on."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("found no compiled frames")
        return super().forward(inputs.flatten(1))


class Compiled(CellWorkload):
    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Alone(FEATURES, 4)


def test_operators_that_take_functions_are_looked_through() -> None:
    assert inspect_workload(opened(Branching, "float32")).rounds_to == ("bfloat16", "float32")


def test_what_cannot_be_looked_at_while_it_runs_runs_all_the_same() -> None:
    facts = inspect_workload(opened(Compiled, "float32"))
    assert facts.rounds_to == ("float32",)
    assert facts.saved_bytes_per_sample > 0


def test_filters_that_no_rank_could_have_stay_behind() -> None:
    class Nowhere(Warning):
        """Of a function, which nothing finds by its name."""

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", Nowhere)
        sent = [category for _, _, category, *_ in reused_worlds._filters()]
    assert UserWarning in sent
    assert Nowhere not in sent
