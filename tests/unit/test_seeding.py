"""Seeding with no device beside the CPU leaves the generators where torch's own seeding does."""

import random

import pytest
import torch

from distcheck.machine import seeds


@pytest.mark.parametrize("accelerator", [True, False])
def test_every_generator_is_seeded(accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    monkeypatch.setattr(seeds, "_may_have_accelerator", lambda: accelerator)
    torch.manual_seed(11)
    expected = torch.rand(3), random.Random(11).random(), numpy.random.RandomState(11).rand()
    seeds.seed_everything(11)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), numpy.random.rand()) == expected[1:]


def test_a_device_file_makes_torch_seed_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    for there in (True, False):
        monkeypatch.setattr(seeds, "_may_have_accelerator", lambda there=there: there)
        seeds.seed_everything(3)
    assert seeded == [3]
