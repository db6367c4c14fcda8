"""Where rounding decides on which side of a ReLU's kink a unit is, and what the other side gives.

A sum that is split over ranks is rounded in another order than in one process. Where a ReLU's input
is within that rounding of 0, the two may fall on different sides, and one sample's share of the
gradient comes or goes. Both are right. With few such units the gradient on the other side of each
is computed, and what ranks hold must be the whole batch's plus some of these differences.

The units are those with an input of at most _NEAR times the layer's largest, the nearest _MOST of
them. That is chosen: a hundred roundings of float32. More of them would not make a wrong gradient
right, as each difference is the exact one of a perturbation that small.
"""

from collections.abc import Sequence
from typing import Any

import torch

from distcheck.judge.oracles.references import AtStep
from distcheck.machine.compat import TorchDispatchMode
from distcheck.machine.numerics import smallest, unit_roundoff, wide

# Chosen: see above.
_NEAR = 128 * unit_roundoff("float32")
_MOST = 12
_MOST_ELEMENTS = 1 << 25  # of all differences, which are held at once
_RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)

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
