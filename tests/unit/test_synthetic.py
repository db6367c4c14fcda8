"""Synthetic images: the same bits everywhere, balanced, learnable."""

import pytest
import torch

from distcheck.machine.shared_tensors import raw_bytes
from distcheck.workloads.datasets import synthetic
from distcheck.workloads.datasets.synthetic import CachedSamples, SyntheticSamples, hash24

SAMPLES = SyntheticSamples()


def test_the_hash_is_splitmix64() -> None:
    # SplitMix64 seeded with 0 yields 0xE220A8397B1DCDAF first: its output function at one golden
    # step. The top 24 bits are what hash24 keeps.
    assert int(hash24(torch.tensor(1))) == 0xE220A8397B1DCDAF >> 40


def test_bits_do_not_depend_on_what_was_drawn_before() -> None:
    ids = torch.tensor([0, 17, 49_999])
    first, labels = SAMPLES.read(ids, train=True, dtype=torch.float32)
    torch.rand(100)
    again, _ = SAMPLES.read(ids.flip(0), train=True, dtype=torch.float32)
    assert torch.equal(first, again.flip(0))
    assert labels.tolist() == SAMPLES.read(ids, train=True, dtype=torch.float64)[1].tolist()


def test_the_bits_are_pinned() -> None:
    import xxhash

    images, labels = SAMPLES.read(torch.arange(8), train=True, dtype=torch.float32)
    assert labels.tolist() == PINNED_LABELS
    assert xxhash.xxh3_64_hexdigest(raw_bytes(images)) == PINNED_DIGEST


def test_many_samples_have_the_bits_of_each() -> None:
    ids = torch.randperm(50_000, generator=torch.Generator().manual_seed(3))[:37]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        images, labels = SAMPLES.read(ids, train=True, dtype=dtype)
        alone = [SAMPLES.read(one, train=True, dtype=dtype) for one in ids.split(1)]
        assert torch.equal(images, torch.cat([image for image, _ in alone]))
        assert torch.equal(labels, torch.cat([label for _, label in alone]))
    assert SAMPLES.read(ids[:0], train=True, dtype=torch.float32)[0].shape == (0, 3, 32, 32)


def test_shapes_splits_and_statistics() -> None:
    images, labels = SAMPLES.read(torch.arange(2000), train=True, dtype=torch.float32)
    assert images.shape == (2000, 3, 32, 32)
    assert labels.bincount(minlength=10).min() > 140
    assert abs(float(images.mean())) < 0.02
    assert 0.9 < float(images.var()) < 1.2
    test, _ = SAMPLES.read(torch.arange(10), train=False, dtype=torch.float32)
    assert not torch.equal(test, images[:10])


def test_a_linear_model_learns_it() -> None:
    images, labels = SAMPLES.read(torch.arange(3000), train=True, dtype=torch.float32)
    means = torch.stack([images[labels == c].mean(0) for c in range(10)]).flatten(1)
    fresh, expected = SAMPLES.read(torch.arange(500), train=False, dtype=torch.float32)
    right = (fresh.flatten(1) @ means.t()).argmax(1) == expected
    assert float(right.float().mean()) > 0.8


PINNED_LABELS = [6, 5, 2, 8, 8, 2, 9, 1]
PINNED_DIGEST = "50e2cd4124cfcac9"


def test_remembered_samples_are_the_same_and_each_readers_own() -> None:
    remembered, ids = CachedSamples(), torch.tensor([3, 40_000])
    for train in (True, False):
        for dtype in (torch.float32, torch.float64):
            of_test = ids if train else ids % 10_000
            expected, labels = SAMPLES.read(of_test, train=train, dtype=dtype)
            for _ in range(2):
                images, found = remembered.read(of_test, train=train, dtype=dtype)
                assert images.dtype == dtype
                assert torch.equal(images, expected)
                assert torch.equal(found, labels)
                images.zero_()  # as code under test may do
                found.zero_()


def test_what_is_too_large_is_made_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_made", {})
    monkeypatch.setattr(synthetic, "_MOST_BYTES", 3 * 32 * 32 * 4)
    ids = torch.tensor([1]), torch.tensor([2])
    for one in ids:
        CachedSamples().read(one, train=True, dtype=torch.float32)
    assert len(synthetic._made) == 1
