"""What a pass does not show, as docs/what-equal-means.md says it: wrong code passes there, and
fails where the page says that it is seen.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distcheck
from distcheck.contract import RankOrder, Step, strategy

pytestmark = pytest.mark.usefixtures("no_rerun")

HERE = "tests.world.test_not_shown"
SMALL = "tests.mutants.small:Small"
SUBTLE = "tests.mutants.subtle.state"


def _gathered(gradient: torch.Tensor, step: Step) -> list[torch.Tensor]:
    parts = [torch.empty_like(gradient) for _ in range(step.world_size)]
    dist.all_gather(parts, gradient * step.weight)
    return parts


@strategy(order=RankOrder(), scale="divide-after")
def promises_ranks_in_order_and_adds_them_backwards(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        total, *others = reversed(_gathered(parameter.grad, step))
        for part in others:
            total = total + part
        parameter.grad.copy_(total / step.world_size)


def nothing_from_step_4_on(model: nn.Module, step: Step) -> None:
    if step.index < 4:
        for parameter in model.parameters():
            parameter.grad.copy_(sum(_gathered(parameter.grad, step)) / step.world_size)


def up_to_two_dimensions(model: nn.Module, step: Step) -> None:
    """Takes what has two dimensions; a convolution's weight has four."""
    for parameter in model.parameters():
        if parameter.dim() <= 2:
            parameter.grad.copy_(sum(_gathered(parameter.grad, step)) / step.world_size)


def unweighted(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size())


class SeedsBeforeEveryForward:
    """All ranks draw the masks of one seed."""

    def wrap(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: torch.manual_seed(7) and None)
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(step.weight)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(step.world_size)


def verdict(strategy: str, *, world: int, workload: str, steps: int = 1) -> str:
    report = distcheck.verify(
        strategy, world=world, workload=workload, dtype="float32", batch=64, steps=steps
    )
    return report.verdict


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("promises_ranks_in_order_and_adds_them_backwards", marks=pytest.mark.sweep),
        "unweighted",
    ],
)
def test_worlds_that_hide_an_order_or_a_weight(name: str) -> None:
    assert verdict(f"{HERE}:{name}", world=2, workload=SMALL) == "pass"
    assert verdict(f"{HERE}:{name}", world=3, workload=SMALL) == "fail"


def draws_and_puts_back(model: nn.Module, step: Step) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        unweighted(model)


@pytest.mark.parametrize(
    ("strategy", "workload", "remarks"),
    [
        (f"{SUBTLE}:seeds_all_ranks_alike", "dropout", 1),
        (f"{HERE}:draws_and_puts_back", "dropout", 0),
        (f"{SUBTLE}:seeds_all_ranks_alike", SMALL, 0),  # which draws nothing
    ],
)
def test_ranks_with_one_seed_get_a_remark(strategy: str, workload: str, remarks: int) -> None:
    report = distcheck.verify(strategy, world=2, workload=workload, batch=64, steps=2)
    (case,) = report.cases
    said = "ranks 0, 1 begin step 1 with the same RNG state"
    assert sum(said in result.reason for result in case.checks) == remarks
    assert report.verdict == "pass"


def test_ranks_that_are_seeded_alike_fail_within_the_forward_pass() -> None:
    assert verdict(f"{HERE}:SeedsBeforeEveryForward", world=2, workload="dropout") == "fail"


def test_a_missing_first_broadcast_shows_in_its_cell_alone() -> None:
    assert verdict(f"{SUBTLE}:no_first_broadcast", world=2, workload=SMALL) == "pass"
    assert verdict(f"{SUBTLE}:no_first_broadcast", world=2, workload="different_starts") == "fail"


def test_what_begins_after_the_last_step_shows_with_more_steps() -> None:
    late = f"{HERE}:nothing_from_step_4_on"
    assert verdict(late, world=2, workload=SMALL, steps=4) == "pass"
    assert verdict(late, world=2, workload=SMALL, steps=5) == "fail"


def test_what_chooses_by_dimensions_shows_in_a_model_that_has_them() -> None:
    assert verdict(f"{HERE}:up_to_two_dimensions", world=2, workload=SMALL) == "pass"
    assert verdict(f"{HERE}:up_to_two_dimensions", world=2, workload="cnn") == "fail"
