"""Finds units near a kink of a ReLU, whose side depends on rounding, and computes gradients on the
other side.

A sum that is split over ranks is rounded in a different order than in one process. If a ReLU's
input is within that rounding of 0, the two may be on different sides, and one sample's contribution
to the gradient appears or vanishes. Both are right. With few such units, the gradient on the other
side of each is computed, and the ranks' gradient must be the full batch's plus some of these
differences.

Units are near if their input is at most _NEAR times the layer's largest; the nearest _MOST are
used. _NEAR is a heuristic, a hundred roundings of float32. A larger value would not make a wrong
gradient right, because each difference is the exact effect of a perturbation that small.

On two kinds of device every sum rounds differently, and in a large network some units (one in a
million) are on different sides, each with a sample's whole contribution. These units are unknown.
So all units near a kink are moved to the other side, and in a second pass a random half of them;
the difference between two devices consists of some of these changes. _SOME times the larger of both
distances is allowed in addition to the tolerance. In VGG11 with 256 images, two other kernels of a
CPU changed gradients by 0.2 to 0.5 of it.

Units are inputs of a ReLU, and the largest two in a window of a maximum. Here, near means within
_NEAR of the largest value in a layer with this median. An input masked with -1e9 thus makes no
other unit near. Other functions with discontinuous derivatives are not examined; their names are
returned if their input has a gradient.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from distcheck.judge.oracles.references import AtStep
from distcheck.machine.compat import TorchDispatchMode
from distcheck.machine.numerics import as_float64, distance, smallest, unit_roundoff

# Heuristic: see above.
_NEAR = 128 * unit_roundoff("float32")
_MOST = 12
_MOST_ELEMENTS = 1 << 25  # of all differences, which are held at once
# Measured: 0.2 to 0.5, see above.
_SOME = 2.0
_RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
_MAXIMUM = torch.ops.aten.max_pool2d_with_indices.default
# Heuristic: ratio of the largest of a million normally distributed numbers to their median size.
_LARGEST = 7.5
_MOST_SIZES = 1 << 18  # elements of a layer from which the median is computed
# Functions with discontinuous derivatives, by their aten names without the in-place suffix, whose
# units are not searched for.
_OTHERS = {
    "leaky_relu", "prelu", "_prelu_kernel", "rrelu_with_noise", "elu", "threshold", "hardtanh",
    "hardswish", "hardsigmoid", "hardshrink", "softshrink", "clamp", "clamp_min", "clamp_max",
    "abs", "sgn", "sign", "round", "floor", "ceil", "trunc", "gt", "lt", "ge", "le", "maximum",
    "minimum", "fmax", "fmin", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin",
    "cummax", "cummin", "topk", "sort", "kthvalue", "median", "nanmedian", "mode",
    "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d", "multi_margin_loss",
    "multilabel_margin_loss_forward", "smooth_l1_loss", "_embedding_bag", "scatter_reduce",
    "index_reduce",
}  # fmt: skip

Unit = tuple[int, int]  # call index of a ReLU in a forward pass, and element index


class UnitsNearKinks(TorchDispatchMode):
    """Finds units near a kink in a forward pass, and moves `flipped` units to the other side."""

    supports_higher_order_operators = True

    def __init__(self, flipped: Sequence[Unit] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flipped, self._calls = flipped, 0
        self.near: list[tuple[float, Unit]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _RELU:
            return func(*args, **(kwargs or {}))
        inputs = args[0].detach().clone()
        found = func(*args, **(kwargs or {}))
        call, self._calls = self._calls, self._calls + 1
        most = float(inputs.abs().max()) if inputs.numel() else 0.0
        sizes = inputs.abs().reshape(-1)
        for place in (sizes <= _NEAR * most).nonzero().flatten().tolist() if most else ():
            self.near.append((float(sizes[place]) / most, (call, place)))
        mine = [place for at, place in self._flipped if at == call]
        if mine:
            flat = found.view(-1)
            for place in mine:  # the smallest number is on the other side
                there = float(flat[place]) > 0
                flat[place] = 0.0 if there else smallest(found.dtype)
        return found


def gradients_on_sides_of_kinks(at: AtStep, indices: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return the full batch's gradients of these parameters with units on the ranks' sides, as
    fitted to the recording. Return an empty dictionary if no unit is near a kink.
    """
    reference, looked = at.references.full_batch, UnitsNearKinks()
    reference.run(at.step, within=looked)
    size = sum(at.specs[index].elements for index in indices)
    units = [unit for _, unit in sorted(looked.near)[: min(_MOST, _MOST_ELEMENTS // size)]]
    expected = [at.full_batch.gradients[index] for index in indices]
    held = [at.recorded_gradients(index) for index in indices]
    if not units or any(e is None for e in expected) or any(not h for h in held):
        return {}
    right = [as_float64(e) for e in expected if e is not None]
    apart = torch.cat([(as_float64(h[0]) - r).flatten() for h, r in zip(held, right, strict=True)])
    columns = []
    for unit in units:
        flipped = reference.run(at.step, within=UnitsNearKinks([unit])).gradients
        moved = [flipped[index] for index in indices]
        if any(m is None for m in moved):
            return {}
        parts = [as_float64(m) for m in moved if m is not None]
        columns.append(torch.cat([(m - r).flatten() for m, r in zip(parts, right, strict=True)]))
    system = torch.stack(columns, dim=1)
    sides = torch.linalg.lstsq(system, apart.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    chosen = sides.round().clamp(0, 1)
    if not bool(chosen.any()):
        return {}
    moved_by = (system @ chosen).split([r.numel() for r in right])
    found = {}
    for index, one, by, like in zip(indices, right, moved_by, expected, strict=True):
        assert like is not None
        parts_of = one + by.view(one.shape)
        found[index] = torch.view_as_complex(parts_of) if like.is_complex() else parts_of
    return found


class UnitsOnOtherSides(TorchDispatchMode):
    """Moves all units near a kink (with a seed, a random half) to the other side in a forward pass.
    `others` collects names of further functions with kinks.
    """

    supports_higher_order_operators = True

    def __init__(self, half: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._half = None if half is None else torch.Generator().manual_seed(half)
        self.others: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RELU:
            near = self._choose_units(args[0].abs() <= _nearness(args[0]))
            found = func(*args, **(kwargs or {}))
            other = torch.where(found > 0, 0.0, smallest(found.dtype)).to(found.dtype)
            return found.copy_(torch.where(near, other, found))
        found = func(*args, **(kwargs or {}))
        if func is _MAXIMUM:
            largest, places = found
            second, others = _second_max(args, places, **(kwargs or {}))
            near = self._choose_units(largest - second <= _nearness(largest))
            return torch.where(near, second, largest), torch.where(near, others, places)
        name = func.__name__.partition(".")[0].rstrip("_")
        if name in _OTHERS and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            self.others.add(name)
        return found

    def _choose_units(self, near: torch.Tensor) -> torch.Tensor:
        if self._half is None:
            return near
        return near & (torch.rand(near.shape, generator=self._half) < 0.5).to(near.device)


def _nearness(values: torch.Tensor) -> float:
    """Return the distance from a kink that counts as near, in a layer with these values."""
    sizes = values.detach().abs().flatten()
    sizes = sizes[:: max(1, len(sizes) // _MOST_SIZES)]
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    if not len(sizes):
        return 0.0
    return _NEAR * _LARGEST * float(sizes.median())


def _second_max(
    args: tuple[Any, ...], places: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the second largest value of every pooling window, like `max_pool2d_with_indices`,
    given the places of the largest; -inf for a window of one.
    """
    inputs, size, *rest = args
    names = ("stride", "padding", "dilation", "ceil_mode")
    given = {**dict(zip(names, rest, strict=False)), **more}
    sizes = _to_pair(size)
    strides, gaps = _to_pair(given.get("stride") or size), _to_pair(given.get("dilation", 1))
    before, outputs, lengths = (
        _to_pair(given.get("padding", 0)),
        places.shape[-2:],
        inputs.shape[-2:],
    )
    reach = [(n - 1) * s + g * (k - 1) + 1
             for n, s, g, k in zip(outputs, strides, gaps, sizes, strict=True)]  # fmt: skip
    after = [max(0, r - n - b) for r, n, b in zip(reach, lengths, before, strict=True)]
    room = (before[1], after[1], before[0], after[0])
    grid = torch.arange(lengths[0] * lengths[1], device=inputs.device).view(1, *lengths)
    padded = F.pad(inputs.detach(), room, value=-math.inf)
    numbered = F.pad(grid, room, value=-1)
    values, numbers = [], []
    for down, across in product(range(sizes[0]), range(sizes[1])):
        rows = slice(down * gaps[0], down * gaps[0] + (outputs[0] - 1) * strides[0] + 1, strides[0])
        columns = slice(
            across * gaps[1], across * gaps[1] + (outputs[1] - 1) * strides[1] + 1, strides[1]
        )
        number = numbered[..., rows, columns].expand(places.shape)
        values.append(padded[..., rows, columns].masked_fill(number == places, -math.inf))
        numbers.append(number)
    second, which = torch.stack(values).max(dim=0)
    return second, torch.stack(numbers).gather(0, which.unsqueeze(0)).squeeze(0)


def _to_pair(number: Any) -> tuple[int, int]:
    several = [number] if isinstance(number, int) else list(number)
    return (several[0], several[-1])


def device_tolerances(at: AtStep, indices: Sequence[int]) -> tuple[dict[int, float], list[str]]:
    """Return the additional L2 tolerance of these gradients on a different device, and names of
    functions with kinks that were not examined.
    """
    reference, right = at.references.full_batch, at.full_batch.gradients
    found, others = dict.fromkeys(indices, 0.0), set[str]()
    for half in (None, 0):
        mode = UnitsOnOtherSides(half)
        moved = reference.run(at.step, within=mode).gradients
        others |= mode.others
        for index in indices:
            one, whole = moved[index], right[index]
            if one is not None and whole is not None:
                found[index] = max(found[index], _SOME * distance(one, whole))
    return found, sorted(others)
