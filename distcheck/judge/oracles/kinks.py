"""Where rounding decides on which side of a ReLU's kink a unit is, and what the other side gives.

A sum that is split over ranks is rounded in another order than in one process. Where a ReLU's input
is within that rounding of 0, the two may fall on different sides, and one sample's share of the
gradient comes or goes. Both are right. With few such units the gradient on the other side of each
is computed, and what ranks hold must be the whole batch's plus some of these differences.

The units are those with an input of at most _NEAR times the layer's largest, the nearest _MOST of
them. That is chosen: a hundred roundings of float32. More of them would not make a wrong gradient
right, as each difference is the exact one of a perturbation that small.

Between two kinds of device every sum rounds in another way, and in a large network some units are
on other sides: one in a million, each with the whole share of a sample. Which ones is not known. So
all units within _NEAR are put on the other side at once, and a random half of them: what two
devices move are some of these. Shares of different samples are nearly orthogonal, so some of them
are no larger than all together; _SOME times the larger of both is allowed beside the tolerance. In
VGG11 with 256 images two other kernels of a CPU moved gradients by 0.2 to 0.5 of the larger one,
and TensorFloat-32 on a GPU moves them by three times as much. Units are inputs of a ReLU, and the
largest two of a maximum; a model with other kinks is not judged where the tolerance does not hold.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from distcheck.judge.oracles.references import AtStep
from distcheck.machine.compat import TorchDispatchMode
from distcheck.machine.numerics import distance, smallest, unit_roundoff, wide

# Chosen: see above.
_NEAR = 128 * unit_roundoff("float32")
_MOST = 12
_MOST_ELEMENTS = 1 << 25  # of all differences, which are held at once
# Measured allowance: 0.2 to 0.5 was measured, see above.
_SOME = 2.0
_RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
_MAXIMUM = torch.ops.aten.max_pool2d_with_indices.default
# Functions whose derivative jumps, by their names in aten, and whose units are not looked for.
_OTHERS = {
    "leaky_relu", "leaky_relu_", "prelu", "_prelu_kernel", "rrelu_with_noise", "threshold",
    "hardtanh", "hardtanh_", "hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_",
    "hardshrink", "softshrink", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max",
    "clamp_max_", "abs", "abs_", "sgn", "sign", "maximum", "minimum", "max", "min", "amax", "amin",
    "topk", "sort", "kthvalue", "median", "max_pool3d_with_indices", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "fractional_max_pool2d", "round", "floor", "ceil", "gt", "lt", "ge",
    "le",
}  # fmt: skip

Unit = tuple[int, int]  # which call of a ReLU in a forward pass, and which element of it


class Units(TorchDispatchMode):
    """Looks for units near a kink in a forward pass, and puts `flipped` ones on the other side."""

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
            for place in mine:  # the smallest number is on a kink's other side
                there = float(flat[place]) > 0
                flat[place] = 0.0 if there else smallest(found.dtype)
        return found


def beside_kinks(at: AtStep, indices: Sequence[int]) -> dict[int, torch.Tensor]:
    """The whole batch's gradients of these parameters with the units on the sides on which the
    ranks' are, as far as what they recorded shows; nothing where no unit is near a kink.
    """
    reference, looked = at.references.full_batch, Units()
    reference.run(at.step, within=looked)
    size = sum(at.specs[index].elements for index in indices)
    units = [unit for _, unit in sorted(looked.near)[: min(_MOST, _MOST_ELEMENTS // size)]]
    expected = [at.full_batch.gradients[index] for index in indices]
    held = [at.recorded_gradients(index) for index in indices]
    if not units or any(e is None for e in expected) or any(not h for h in held):
        return {}
    right = [wide(e) for e in expected if e is not None]
    apart = torch.cat([(wide(h[0]) - r).flatten() for h, r in zip(held, right, strict=True)])
    columns = []
    for unit in units:
        flipped = reference.run(at.step, within=Units([unit])).gradients
        moved = [flipped[index] for index in indices]
        if any(m is None for m in moved):
            return {}
        parts = [wide(m) for m in moved if m is not None]
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


class OtherSides(TorchDispatchMode):
    """Puts the units near a kink on the other side in a forward pass: all, or with a seed a random
    half. `others` are the names of other functions with kinks that it has met.
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
            near = self._chosen(args[0].abs() <= _nearness(args[0]))
            found = func(*args, **(kwargs or {}))
            other = torch.where(found > 0, 0.0, smallest(found.dtype)).to(found.dtype)
            return found.copy_(torch.where(near, other, found))
        found = func(*args, **(kwargs or {}))
        if func is _MAXIMUM:
            inputs, (largest, places) = args[0], found
            taken = inputs.flatten(-2).scatter(-1, places.flatten(-2), -math.inf)
            second, others = func(taken.view_as(inputs), *args[1:], **(kwargs or {}))
            near = self._chosen((largest - second <= _nearness(inputs)) & second.isfinite())
            return torch.where(near, second, largest), torch.where(near, others, places)
        name = func.__name__.partition(".")[0]
        if name in _OTHERS:
            self.others.add(name)
        return found

    def _chosen(self, near: torch.Tensor) -> torch.Tensor:
        if self._half is None:
            return near
        return near & (torch.rand(near.shape, generator=self._half) < 0.5).to(near.device)


def _nearness(inputs: torch.Tensor) -> float:
    return _NEAR * float(inputs.abs().max()) if inputs.numel() else 0.0


def between_devices(at: AtStep, indices: Sequence[int]) -> tuple[dict[int, float], list[str]]:
    """How much further these parameters' gradients on another device may be from the whole batch's,
    as L2 norms; and which functions with kinks there are beside those that were looked at.
    """
    reference, right = at.references.full_batch, at.full_batch.gradients
    found, others = dict.fromkeys(indices, 0.0), set[str]()
    for half in (None, 0):
        mode = OtherSides(half)
        moved = reference.run(at.step, within=mode).gradients
        others |= mode.others
        for index in indices:
            one, whole = moved[index], right[index]
            if one is not None and whole is not None:
                found[index] = max(found[index], _SOME * distance(one, whole))
    return found, sorted(others)
