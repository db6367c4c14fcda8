"""What is specific to a comparison of two kinds of device, without ranks."""

import math
import os
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distcheck.errors import CannotRunError
from distcheck.judge.diagnosis import observation
from distcheck.judge.oracles import between_devices, kinks
from distcheck.judge.oracles.full_batch_bound import FullBatchBound, _Sides
from distcheck.judge.oracles.kinks import UnitsOnOtherSides
from distcheck.machine import devices, resources, seeds
from distcheck.records import Case


@pytest.mark.parametrize(
    "about",
    [
        (3, 2, 1, 1, False), (2, 2, 0, 1, True), ((2, 3), (1, 2), (1, 1), (1, 1), False),
        (3, 1, 1, 2, False), (3, 3, 0, 1, True), (2,), ((2, 1), []), (1, 1),
    ],
    ids=str,
)  # fmt: skip
def test_the_second_largest_of_every_window(about: tuple[Any, ...]) -> None:
    inputs = torch.randn(2, 2, 7, 9, generator=torch.Generator().manual_seed(0))
    _, places = torch.ops.aten.max_pool2d_with_indices(inputs, *about)
    second, others = kinks._second_max((inputs, *about), places)
    for at in product(*map(range, places.shape)):
        left = inputs.clone().flatten(2)
        left[at[0], at[1], places[at]] = -math.inf
        value, place = torch.ops.aten.max_pool2d_with_indices(left.view_as(inputs), *about)
        assert second[at] == value[at]
        assert others[at] == place[at] or second[at] == -math.inf


def test_near_is_what_the_usual_size_rounds_to() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    usual = kinks._nearness(values)
    assert usual == pytest.approx(128 * 2.0**-24 * 5, rel=0.2)
    masked = torch.cat([values, torch.tensor([-1e9, -math.inf, math.nan, 0.0, 1e30])])
    assert kinks._nearness(masked) == pytest.approx(usual, rel=0.05)
    assert kinks._nearness(torch.zeros(3)) == kinks._nearness(torch.zeros(0)) == 0.0


def test_a_masked_maximum_is_near_nothing() -> None:
    scores = torch.tensor([[[[5.0, -1e9, -1e9, 4.0]]]], requires_grad=True)
    with UnitsOnOtherSides(None):
        F.max_pool2d(scores, (1, 2)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.flatten().tolist() == [1.0, 0.0, 0.0, 1.0]


def test_units_near_a_kink_are_on_its_other_side_and_no_others() -> None:
    inputs = torch.tensor([1.0, -1.0, 1e-7, -1e-7, 0.5, 0.9], requires_grad=True)
    with UnitsOnOtherSides(None):
        F.relu(inputs).sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    inputs = (torch.ones(1000) * 1e-7).index_fill(0, torch.arange(600), 1.0).requires_grad_()
    with UnitsOnOtherSides(0):
        F.relu(inputs).sum().backward()
    assert inputs.grad is not None
    assert inputs.grad[:600].sum() == 600
    assert 150 < inputs.grad[600:].sum() < 250  # a random half


@pytest.mark.parametrize(
    ("function", "others"),
    [
        (lambda x: F.relu(x), set()),
        (lambda x: F.gelu(x) + torch.tanh(x), set()),
        (lambda x: F.leaky_relu(x), {"leaky_relu"}),
        (lambda x: F.selu(x), {"elu"}),
        (lambda x: F.threshold(x + 0, 0.0, 0.0, inplace=True), {"threshold"}),
        (lambda x: x * (x > 0), {"gt"}),
        # Nothing that has a gradient: a causal mask, a number of tokens.
        (lambda x: x * (torch.arange(3)[:, None] >= torch.arange(3)), set()),
        (lambda x: x / torch.tensor(3).clamp(min=1), set()),
    ],
)
def test_other_functions_with_kinks_are_met(function: Any, others: set[str]) -> None:
    with UnitsOnOtherSides(None) as met:
        function(torch.ones(3, 3, requires_grad=True) * 2).sum().backward()
    assert met.others == others


def test_a_limit_is_that_of_the_wider_bound() -> None:
    sides, nothing = _Sides(further={0: 2.0}), torch.zeros(1)
    both = FullBatchBound(
        SimpleNamespace(), (), gradients=(nothing, nothing), tolerances=(1.0, 1.0), sides=sides,
        nan_is_expected=False,
    )  # type: ignore[arg-type] # fmt: skip
    assert both.limit(0, [])(1) == 3.0  # type: ignore[operator]
    assert both.limit(1, [])(1) == 1.0  # type: ignore[operator]


def test_a_closer_look_is_on_the_device_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is computed again has the bits that were recorded."""
    asked = []

    def enter(device: str, local_rank: int) -> None:
        asked.append(device)
        raise CannotRunError("that is all")

    monkeypatch.setattr(devices, "enter", enter)
    for module, name in ((os, "nice"), (seeds, "pin_determinism")):  # of a process of its own
        monkeypatch.setattr(module, name, lambda *_: None)
    case = Case(id="it", strategy="it", world=2, device="cuda", reference_device="cpu")
    request: Any = SimpleNamespace(case=case)
    with pytest.raises(CannotRunError):
        observation.observe_job.__wrapped__(request, {}, None)  # type: ignore[attr-defined]
    assert asked == ["cuda"]


@pytest.mark.parametrize(
    ("taken", "free", "reserved", "count", "beside"),
    [
        (1, 40, 1, 16, 8),  # at most
        (1, 40, 1, 4, 4),
        (9, 40, 9, 16, 4),
        (9, 40, 0, 16, 3),  # this process has yet to take its own
        (9, 15, 9, 16, 1),
        (60, 15, 60, 16, 1),  # one is tried
    ],
)
def test_as_many_copies_as_the_gpu_has_room_for(
    monkeypatch: pytest.MonkeyPatch, taken: int, free: int, reserved: int, count: int, beside: int
) -> None:
    """In GiB; each takes one more for its context."""
    monkeypatch.setattr(devices, "cores", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: reserved << 30)
    assert devices.count_of_further_processes(taken << 30) == beside
    assert devices.gpu_bytes_taken() == reserved << 30


def test_without_a_gpu_copies_fill_the_cores() -> None:
    assert devices.count_of_further_processes(1 << 40) == min(resources.cores(), 8)
    assert devices.gpu_bytes_taken() == 0


@pytest.mark.parametrize("moved", [{None: 1.0, 0: 3.0}, {None: 3.0, 0: 1.0}], ids=str)
def test_the_larger_of_both_passes_counts_twice(moved: dict[int | None, float]) -> None:
    def run(step: int, *, within: UnitsOnOtherSides) -> Any:
        by = moved[None if within._half is None else 0]
        return SimpleNamespace(gradients=[torch.tensor([by]), None])

    at: Any = SimpleNamespace(
        step=0, references=SimpleNamespace(full_batch=SimpleNamespace(run=run)),
        full_batch=SimpleNamespace(gradients=[torch.zeros(1), None]),
    )  # fmt: skip
    assert kinks.device_tolerances(at, [0, 1]) == ({0: 6.0, 1: 0.0}, [])


@pytest.mark.parametrize(
    ("moved", "exact", "others", "rounding", "why"),
    [
        (0.0, 4.0, [], {0: 7.0}, ""),  # a long sum's own rounding
        (0.0, None, [], {0: 7.0}, ""),  # no float64
        (0.0, 4.0, ["abs"], {0: 8.0}, "is not known here (abs)"),
        (4.5, 2.0, [], {}, ""),  # right by the wider bound
        (4.5, 4.0, ["abs"], {}, ""),
        (0.5, 2.0, [], {}, ""),  # the reference is off by 2 itself
    ],
)
def test_what_is_further_off_decides_nothing_where_it_may_be_rounding(
    monkeypatch: pytest.MonkeyPatch, moved: float, exact: float | None, others: list[str],
    rounding: dict[int, float], why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(kinks, "device_tolerances", lambda *_: ({0: moved}, others))
    own = SimpleNamespace(allows=lambda taken, error, bound: 7.0)
    in_double = SimpleNamespace(gradients=[] if exact is None else [torch.tensor([exact]).double()])
    at: Any = SimpleNamespace(own_rounding=own, in_double=SimpleNamespace(full_batch=in_double))
    right, wrong = torch.tensor([4.0]), torch.tensor([9.0])
    further, undecided, said = between_devices.tolerances_between_devices(
        at, (right,), (1.0,), {0: [wrong]}
    )
    assert undecided == rounding
    asked = exact is not None and moved < 4.0  # float64, where it is needed
    assert further == {0: moved + 2 * (4.0 - exact if asked and exact is not None else 0.0)}
    assert why in said
