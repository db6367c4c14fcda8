"""A linear audit of an exchange: replicas that are all wrong alike agree, and this sees it.

Of every gradient, a sum of its elements with signs of chance is taken twice in an audited step: of
what backward gives, before any exchange, and of what the optimizer gets. An exchange, a division
and clipping by norm are linear and the same for all parameters, so that the second is one weighted
mean of the ranks' first, within rounding: each of W ranks has k backward passes, and what lies
between rounds each element at most W + k + 6 times (a sum over ranks and passes; divisions by the
world, by passes, by a scale; a clip), each time by at most the unit roundoff u of the sum of the
sizes that were added. So the bound of a parameter is (W + k + 6) * u * sum |g|. Signs of chance
make a factor of 1 + d show as d * |g|_2, which is above it for up to 1 / (W + k + 6)^2 u^2
elements: of float32 in every tensor; of 16 bits in a part, which is another one each time.

Where fully_shard divides a parameter, the first sum is of the gradient of the whole one that the
model computes with, and the second is added up over the ranks, each of which has it of its part.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distcheck.machine import compat
from distcheck.machine.numerics import unit_roundoff
from distcheck.training.leaf_hooks import LeafHook

Rows = list[list[float]]
_ROUNDINGS = 6  # beside those of ranks and passes
_CHUNK = 1 << 20  # elements whose signs are kept
_VISIBLE = 8  # chosen: a factor of 1 + 1/8 must show where a part of a tensor is taken
_LEAST = 16  # elements of a part
_TRIED = 64  # factors of single gradients
_EQUAL = 1e-3  # chosen: weights of ranks closer than this are equal


@dataclass(frozen=True)
class Mean:
    """What the optimizer got as the weighted mean of the ranks' gradients: the weights, and of the
    parameters that are none, their places, with those of the ranks where it shows.
    """

    weights: tuple[float, ...]
    wrong: dict[int, tuple[int, ...]]
    own: bool = False  # what is wrong there is each rank's own gradient
    compared: int = 0

    @property
    def is_even(self) -> bool:
        """Whether all ranks count alike."""
        mean = sum(self.weights) / len(self.weights)
        return all(abs(one - mean) <= _EQUAL * abs(mean) for one in self.weights)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Places of ranks that do not count."""
        most = max(abs(one) for one in self.weights)
        return tuple(r for r, one in enumerate(self.weights) if abs(one) <= _EQUAL * most)


class Leaf:
    """What one parameter was given since its gradient was cleared."""

    def __init__(self, audit: "Audit", parameter: torch.Tensor, number: int) -> None:
        self._audit, self.parameter, self.number = audit, parameter, number
        self.given: torch.Tensor | None = None
        self.passes = 0
        self.is_divided = type(parameter.data) is not torch.Tensor
        # How many ranks have each part of it, and where in it this rank's part begins.
        self.copies, self.start = _of_parts(parameter) if self.is_divided else (0, 0)
        self.unit = unit_roundoff(parameter.dtype)
        self.whole = None if self.is_divided else parameter  # what backward gives gradients to
        self._hook = None if self.whole is None else LeafHook(self.whole, self._give)
        self._holds: Callable[[], bool] = lambda: False

    def arm(self, wholes: Mapping[int, "Whole"]) -> None:
        """A step that is measured begins. `wholes`: what the model computes with in the place of a
        parameter, by its id.
        """
        self.given, self.passes = None, 0
        found = wholes.get(id(self.parameter))
        if found is not None and _is_plain(found.tensor):
            self._holds = found.holds
            if found.tensor is not self.whole:
                self.whole = found.tensor
                self.unit = max(self.unit, found.unit, unit_roundoff(self.whole.dtype))
                self._hook = LeafHook(self.whole, self._give)
        if self._hook is not None:
            self._hook.put_back()

    def got(self) -> float:
        """The sum of what the optimizer gets; not a number where there is nothing."""
        grad: Any = self.parameter.grad
        if self.is_divided and grad is not None and hasattr(grad, "to_local"):
            grad = grad.to_local()
        if grad is None or type(grad) is not torch.Tensor:
            return math.nan
        return float(self._audit.projected(grad, self)[0])

    def _give(self, gradient: torch.Tensor) -> None:
        if not self._audit.armed:
            return
        if not self._is_held():
            self.given, self.passes = None, 0
        found = self._audit.projected(gradient, self)
        self.given = found if self.given is None else self.given + found
        self.passes += 1

    def _is_held(self) -> bool:
        """Whether what was given before is still to be part of the gradient. A rank's part may be
        zero where the whole gradient is not: then nothing is known of it in this step.
        """
        grads: list[Any] = [t.grad for t in (self.parameter, self.whole) if t is not None]
        parts = [g.to_local() if hasattr(g, "to_local") else g for g in grads if g is not None]
        if not self.is_divided or not parts or self.given is None:
            return self._holds() or any(bool(part.any()) for part in parts)
        if all(part.numel() and not part.any() for part in parts) and not self._holds():
            self.given = torch.full_like(self.given, math.nan)
        return True


class Whole(NamedTuple):
    """What a model computes with in the place of a parameter that fully_shard divides."""

    tensor: torch.Tensor
    unit: float  # the roundoff of its exchange, where that is known
    holds: Callable[[], bool]  # whether gradients of it were put aside


class Audit:
    """Measures the steps of one optimizer for which it is armed. `wire` is the dtype in which the
    exchange rounds, where that is not the gradients' own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, wire: torch.dtype | None) -> None:
        self._wire, self._signs = wire, dict[torch.device, torch.Tensor]()
        self.armed, self._step = False, 0
        self.rows: list[list[float]] = []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = [p for p in parameters if p.requires_grad and (_is_plain(p) or _of_parts(p)[0])]
        self._others = len(parameters) - len(known)  # divided otherwise, or not trained
        self.leaves = [Leaf(self, p, n) for n, p in enumerate(known)]
        self._handle: Any = optimizer.register_step_pre_hook(lambda *_: self._measure())

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [leaf.parameter for leaf in self.leaves]

    @property
    def is_early(self) -> bool:
        """Whether the step was the first one, before which nothing is known of what fully_shard
        divides.
        """
        return self._step == 1 and any(leaf.whole is None for leaf in self.leaves)

    @property
    def left_out(self) -> int:
        """How many parameters it does not see."""
        waits = sum(leaf.whole is None for leaf in self.leaves)
        return self._others + (0 if self.is_early else waits)

    def arm(self, step: int, model: torch.nn.Module | None = None) -> None:
        """Measures the next step of an optimizer that trains a model, if that is known."""
        self.armed, self._step, self.rows = True, step, []
        wholes = {} if model is None else dict(_wholes_in(model))
        for leaf in self.leaves:
            leaf.arm(wholes)

    def close(self) -> None:
        self.armed = False
        self._handle.remove()

    def roundoff(self, leaf: Leaf) -> float:
        """Of the dtype in which a gradient is rounded."""
        return max(leaf.unit, unit_roundoff(self._wire)) if self._wire else leaf.unit

    def projected(self, gradient: torch.Tensor, leaf: Leaf) -> torch.Tensor:
        """The sum of a gradient's elements with signs, and that of their sizes, in float64: of all
        of it, or of this rank's part.
        """
        flat = gradient.detach().reshape(-1)
        total = leaf.parameter.numel()  # of a DTensor, those of the whole
        begin, end = 0, total
        if (part := _part(self.roundoff(leaf))) < total:
            begin = _number(self._step, leaf.number) % (total - part + 1)
            end = begin + part
        start = leaf.start if flat.numel() < total else 0
        low, high = max(start, begin), min(start + flat.numel(), end)
        found = torch.zeros(2, dtype=torch.float64, device=flat.device)
        signs = self._signs_on(flat.device)
        while low < high:
            chunk, at = divmod(low - begin, _CHUNK)
            exact = flat[low - start : min(high, low - at + _CHUNK) - start].double()
            sign = 1 if _number(leaf.number, chunk) % 2 else -1
            signed = exact @ signs[at : at + len(exact)]
            found += torch.stack([sign * signed, exact.abs().sum()])
            low += len(exact)
        return found

    def _signs_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._signs:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(0, 2, (_CHUNK,), generator=generator)
            self._signs[device] = (2.0 * drawn - 1).double().to(device)
        return self._signs[device]

    def _measure(self) -> None:
        """Before a step; of optimizers that call another's step, the innermost counts."""
        if not self.armed:
            return
        self.rows = []
        for leaf in self.leaves:
            given = [0.0, 0.0] if leaf.given is None else leaf.given.tolist()
            self.rows.append([*given, float(leaf.passes), leaf.got()])


def _is_plain(parameter: torch.Tensor) -> bool:
    return type(parameter.data) is torch.Tensor


def _of_parts(parameter: torch.Tensor) -> tuple[int, int]:
    """Of a parameter that is divided by its rows among all ranks: how many have each part, and
    where this rank's begins, in elements. 0 for one that is divided otherwise.
    """
    places: Any = getattr(parameter, "placements", None)
    if places is None or not any(one.is_shard() for one in places):
        return 0, 0
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    by_rows = all(one.is_replicate() or one.is_shard(0) for one in places)
    if not by_rows or mesh.size() != dist.get_world_size():
        return 0, 0
    copies = math.prod(mesh.size(n) for n, one in enumerate(places) if one.is_replicate())
    return copies, compat.part_in(parameter)[0] * math.prod(parameter.shape[1:])


def _wholes_in(model: torch.nn.Module) -> Iterator[tuple[int, Whole]]:
    for module in model.modules():
        _, dtype = compat.fsdp2_dtypes(module)
        unit = 0.0 if dtype is None else unit_roundoff(dtype)
        holding = {id(own): holds for own, holds in compat.fsdp2_holding(module)}
        for own, whole in compat.fsdp2_parameters(module):
            if whole is not None:
                yield id(own), Whole(whole, unit, holding[id(own)])


def added_up(rows: Sequence[Sequence[Sequence[float]]], copies: Sequence[int]) -> list[Rows]:
    """The same where ranks got parts: what all of them have got together. `copies`: how many ranks
    have each part of a parameter, 0 where every rank has the whole.
    """
    found = [[list(row) for row in one] for one in rows]
    for place, several in enumerate(copies):
        if several:
            total = sum(one[place][-1] for one in rows) / several
            for own in found:
                own[place][-1] = total
    return found


def _part(roundoff: float) -> int:
    """How many elements may be summed up for a factor to show in two ranks' mean."""
    return max(_LEAST, int((_VISIBLE * (2 + 1 + _ROUNDINGS) * roundoff) ** -2))


def _number(*about: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:6], "big")


def judge(rows: Sequence[Sequence[Sequence[float]]], roundoff: Sequence[float]) -> Mean | None:
    """Compares what all ranks have measured (by rank and parameter: given, its size, passes, got);
    None where nothing can be. Pure, so that all ranks conclude the same.
    """
    every = torch.tensor(rows, dtype=torch.float64)
    known = (every.isfinite().all(2) & (every[:, :, 1].sum(0) > 0)).all(0)
    places = known.nonzero()[:, 0].tolist()
    if not places:
        return None
    given, size, passes, got = (every[:, places, n] for n in range(4))
    world = len(rows)
    rounding = torch.tensor(roundoff, dtype=torch.float64)[places]
    bound = (world + passes.max(0).values + _ROUNDINGS) * rounding * size.sum(0)
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    for weights in (_even(given, got, bound), _fitted(given, got, bound)):
        if weights is None:
            continue
        wrong = (got - weights @ given).abs() > bound * weights.abs().max()
        if best is None or wrong.any(0).sum() < best[1].any(0).sum():
            best = weights, wrong
    assert best is not None
    weights, wrong = best
    bad = {
        places[n]: tuple(wrong[:, n].nonzero()[:, 0].tolist())
        for n in wrong.any(0).nonzero()[:, 0].tolist()
    }
    of_bad = wrong.any(0)
    scale = float(weights.abs().sum())
    own = bool(bad) and any(
        bool(((got - times * given).abs() <= bound * max(times, 1.0))[:, of_bad].all())
        for times in (1.0, scale)
    )
    return Mean(tuple(weights.tolist()), bad, own, len(places))


def _even(given: torch.Tensor, got: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Equal weights, by the factor that most of the gradients have: of those that single gradients
    have, the one that fits most, and of these least squares over what it fits.
    """
    mean, seen = given.mean(0), got.mean(0)
    ratios = (seen / mean)[mean != 0].sort().values
    some = ratios[torch.linspace(0, max(0, len(ratios) - 1), min(len(ratios), _TRIED)).long()]
    factors = torch.cat([torch.tensor([1.0, float(len(given))], dtype=torch.float64), some])
    near = (seen - factors[:, None] * mean).abs() <= bound * factors.abs()[:, None]
    best = int(near.sum(1).argmax())
    factor, of_it = float(factors[best]), near[best]
    mean, seen = (mean / bound)[of_it], (seen / bound)[of_it]
    if float(mean @ mean):
        factor = float(mean @ seen) / float(mean @ mean)
    return torch.full((len(given),), factor / len(given), dtype=torch.float64)


def _fitted(given: torch.Tensor, got: torch.Tensor, bound: torch.Tensor) -> torch.Tensor | None:
    """Weights of their own for each rank, as of a script that counts samples or tokens: by least
    squares over the gradients that they fit; None where there are too few.
    """
    world, count = given.shape
    kept = torch.ones(count, dtype=torch.bool)
    for _ in range(8):
        if int(kept.sum()) < max(world + 2, count // 2 + 1):
            return None
        rows = (given / bound)[:, kept].T
        found = torch.linalg.lstsq(rows, (got.mean(0) / bound)[kept, None])
        weights: torch.Tensor = found.solution[:, 0]
        fits = ((got - weights @ given).abs() <= bound * weights.abs().max()).all(0)
        if bool((fits | ~kept).all()):
            return weights
        errors = ((got - weights @ given).abs().max(0).values / bound).masked_fill(~kept, -1.0)
        kept &= errors < errors.max() / 2
    return None
