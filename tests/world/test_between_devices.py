"""Ranks on a device that rounds otherwise than the CPU, with which they are compared: pretended by
models that give ranks, which have a process group, other roundings than a judge.
"""

from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from distcheck.judge.jobs import JUDGE, JudgeRequest
from distcheck.records import CheckResult, Compared, PlannedCheck
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool
from tests.world.test_kinks import AtAKink
from tests.world.test_order_of_judging import STEPS, saved

UNITS, OF_THEM = 64, 8
OTHERWISE = "devices round differently"


def _rounding(like: torch.Tensor) -> torch.Tensor:
    """Other signs in ranks than in a judge."""
    drawn = torch.Generator().manual_seed(int(dist.is_initialized()))
    return (torch.randint(0, 2, like.shape, generator=drawn) * 2 - 1) * 2.0**-28


class _Model(nn.Module):
    """Some of its units are at a kink in every step, whatever was learned."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, UNITS)
        self.second = nn.Linear(features, UNITS)
        self.last = nn.Linear(UNITS, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        one, other = self.first(inputs.flatten(1)), self.second(inputs.flatten(1))
        found: torch.Tensor = self.last(self.units(one, other))
        return found

    def units(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        near = one - one.detach() + _rounding(one)
        return F.relu(torch.cat([near[:, :OF_THEM], other[:, OF_THEM:]], dim=1))


class _WithMaximum(_Model):
    def units(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        near = other - other.detach() + one.detach() + _rounding(one)
        other = torch.cat([near[:, :OF_THEM], other[:, OF_THEM:]], dim=1)
        pairs = torch.stack([one, other], dim=2).unsqueeze(1)
        return F.max_pool2d(pairs, (1, 2)).flatten(1)


class _WithAnotherKink(_Model):
    def units(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        near = one - one.detach() + _rounding(one)
        return F.leaky_relu(torch.cat([near[:, :OF_THEM], other[:, OF_THEM:]], dim=1))


class _WithOverlaps(_Model):
    """Windows that share numbers: the second largest of one is the largest of another."""

    def units(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        near = other - other.detach() + one.detach() + _rounding(one)
        pairs = torch.stack([one[:, :OF_THEM], near[:, :OF_THEM]], dim=2).flatten(1)
        pooled = F.max_pool2d(pairs[:, None, None], (1, 3), (1, 2), (0, 1)).flatten(1)
        return torch.cat([pooled, other[:, OF_THEM:]], dim=1)


class _Smooth(_Model):
    def units(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.tanh(one) + other


class WithReLU(AtAKink):
    unit = _Model


class WithMaximum(WithReLU):
    unit = _WithMaximum


class WithOverlaps(WithReLU):
    unit = _WithOverlaps


class WithAnotherKink(WithReLU):
    unit = _WithAnotherKink


class Smooth(WithReLU):
    unit = _Smooth


def correct(model, step):  # type: ignore[no-untyped-def]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


def a_thousandth_more(model, step):  # type: ignore[no-untyped-def]
    correct(model, step)
    for parameter in model.parameters():
        parameter.grad *= 1.001


def undivided(model, step):  # type: ignore[no-untyped-def]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def against_cpu(pool: Pool, folder: Path, strategy: str, workload: type) -> CheckResult:
    """The check of a run whose ranks are taken for those of another device."""
    names = f"{__name__}:{strategy}", [f"{__name__}:{workload.__name__}"]
    run = next(saved(pool, folder, *names, batch=64))
    case = msgspec.structs.replace(run.case, device="cuda", reference_device="cpu")
    planned = PlannedCheck(
        check="gradients", layer="full batch float32", scope="step", required=Compared()
    )
    request = JudgeRequest(
        case=case, facts=run.facts, layout=run.layout, description=b"",
        steps=tuple(range(STEPS)), planned=(planned,),
    )  # fmt: skip
    (found,) = run_job(pool, JUDGE, request, {"trace": run.traces["world"]})
    return found


@pytest.mark.parametrize(
    ("strategy", "workload", "verdict", "said"),
    [
        ("correct", WithReLU, "pass", OTHERWISE),
        pytest.param(*("correct", WithMaximum, "pass", OTHERWISE), marks=pytest.mark.sweep),
        pytest.param(*("correct", WithOverlaps, "pass", OTHERWISE), marks=pytest.mark.sweep),
        ("correct", WithAnotherKink, "unknown", "is not known here (leaky_relu)"),
        pytest.param("correct", Smooth, "pass", "", marks=pytest.mark.sweep),
        ("undivided", WithReLU, "fail", ""),
        pytest.param("undivided", WithMaximum, "fail", "", marks=pytest.mark.sweep),
        pytest.param("undivided", WithAnotherKink, "fail", "", marks=pytest.mark.sweep),
        ("a_thousandth_more", Smooth, "fail", ""),
    ],
)
def test_a_bound_is_wider_by_what_kinks_move_and_no_more(
    pool: Pool, tmp_path: Path, strategy: str, workload: type, verdict: str, said: str
) -> None:
    found = against_cpu(pool, tmp_path / "run", strategy, workload)
    assert found.verdict == verdict, found.reason
    assert said in found.excuse + found.reason
    assert workload is not Smooth or "devices round" not in found.excuse + found.reason


@pytest.mark.sweep
def test_a_bound_that_is_wider_shows_less(pool: Pool, tmp_path: Path) -> None:
    """What mistakes a comparison would have shown is said of the bound that it passed by."""
    wide = against_cpu(pool, tmp_path / "wide", "correct", WithReLU).shown["first.weight"]
    narrow = against_cpu(pool, tmp_path / "narrow", "correct", Smooth).shown["first.weight"]
    assert float(narrow.scale) < 1e-3 < 1e-2 < float(wide.scale)
