"""CIFAR-shaped images computed from a hash of their index: no download, no RNG state, learnable.

Every class has a coarse pattern; a sample is the pattern of its class plus noise. The same index
gives bit-identical data in every process, whatever random numbers were consumed before.
"""

from functools import cache

import torch

_PATTERN_STRENGTH = 0.25
_GRID, _SIZE, _CHANNELS, _CLASSES = 4, 32, 3, 10
_TEST_OFFSET = 1 << 40  # offset of the test split, far behind the training split


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# The multipliers of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", OOPSLA 2014), as signed 64-bit integers: torch's integer arithmetic wraps.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


# Samples per block, so that the data stays in a core's cache, and is allocated once.
_BLOCK = 16


def hash24(keys: torch.Tensor) -> torch.Tensor:
    """Return the top 24 bits of SplitMix64's output function for int64 `keys` of any shape."""
    z = keys * _GOLDEN
    shifted = torch.empty_like(z)
    z ^= _shift_right(z, 30, out=shifted)
    z *= _FIRST
    z ^= _shift_right(z, 27, out=shifted)
    z *= _SECOND
    z ^= _shift_right(z, 31, out=shifted)
    return _shift_right(z, 40, out=shifted)


def _shift_right(value: torch.Tensor, bits: int, *, out: torch.Tensor) -> torch.Tensor:
    """Return a logical right shift; torch's own is arithmetic."""
    torch.bitwise_right_shift(value, bits, out=out)
    return out.bitwise_and_((1 << (64 - bits)) - 1)


def _uniform(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in [-1, 1), exact in float32: 24 bits."""
    return hash24(keys).to(torch.float32).div_(2**23).sub_(1.0).to(dtype)


class ComputedSamples:
    """Samples computed from a hash of their index: as many as CIFAR-10 has."""

    def size(self, *, train: bool) -> int:
        return 50_000 if train else 10_000

    def rows(self, ids: torch.Tensor, *, train: bool) -> torch.Tensor:
        """Return a unique number for each sample of both splits."""
        return ids if train else ids + _TEST_OFFSET


class SyntheticSamples(ComputedSamples):
    """50,000 training and 10,000 test images, 3x32x32, ten classes, mean 0, variance about 1."""

    shape: tuple[int, ...] = (_CHANNELS, _SIZE, _SIZE)
    classes = _CLASSES

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [n, 3, 32, 32] in `dtype` and labels [n] int64."""
        ids = self.rows(ids, train=train)
        labels = hash24(ids * 8191 + 1) % _CLASSES
        pixels = torch.arange(_CHANNELS * _SIZE * _SIZE)
        patterns = _patterns(dtype)
        images = torch.empty(len(ids), *self.shape, dtype=dtype)
        blocks = zip(images.split(_BLOCK), ids.split(_BLOCK), labels.split(_BLOCK), strict=True)
        for image, keys, of_class in blocks:
            noise = _uniform(keys.unsqueeze(1) * 4099 + pixels, dtype).mul_(3**0.5)
            pattern = patterns[of_class]
            torch.add(noise.view_as(image), pattern, alpha=_PATTERN_STRENGTH, out=image)
        return images, labels


_MOST_BYTES = 64 << 20
_made: dict[tuple[bytes, bool, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}


class CachedSamples(SyntheticSamples):
    """Synthetic samples for repeated reads, cached up to _MOST_BYTES and copied."""

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = ids.numpy().tobytes(), train, dtype
        if key not in _made:
            images, labels = super().read(ids, train=train, dtype=dtype)
            if sum(held.nbytes for held, _ in _made.values()) + images.nbytes > _MOST_BYTES:
                return images, labels
            _made[key] = images, labels
        images, labels = _made[key]
        return images.clone(), labels.clone()


@cache
def _patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return the pattern of every class; it must not be written to."""
    cells = torch.arange(_CLASSES * _CHANNELS * _GRID * _GRID)
    coarse = _uniform(cells - 10**9, dtype).view(_CLASSES, _CHANNELS, _GRID, _GRID)
    block = _SIZE // _GRID
    return coarse.repeat_interleave(block, 2).repeat_interleave(block, 3)
