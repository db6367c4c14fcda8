"""Audits gradient synchronization by random projections. It detects errors that are identical on
all replicas.

In an audited step, each gradient is projected onto a random ±1 vector twice: as backward produces
it, before any communication, and as the optimizer receives it. Reduction, division and clipping by
norm are linear and the same for all parameters. Within rounding, the second projection must
therefore be a weighted mean of the ranks' first projections, with the same weights for all
parameters. With W ranks and k backward passes, each element is rounded at most W + k + 6 times (a
sum over ranks and passes; divisions by the world size, by passes, by a loss scale; a clip), each
time by at most the unit roundoff u of the summed magnitudes. The bound of a parameter is therefore
(W + k + 6) * u * sum |g|. A factor of 1 + d appears as d * |g|_2, which exceeds the bound for up to
1 / (W + k + 6)^2 u^2 elements. For float32 this allows whole tensors. For 16-bit dtypes, a part of
the tensor is projected, a different part each time.

If fully_shard shards a parameter, the first projection covers the unsharded gradient of the model.
The second one is summed over the ranks, each of which contributes its shard.
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
_ROUNDINGS = 6  # roundings in addition to those of ranks and passes
_CHUNK = 1 << 20  # number of signs that are kept
_VISIBLE = 8  # Heuristic: a factor of 1 + 1/8 must be visible in a part of a tensor
_LEAST = 16  # minimum number of elements in a part
_TRIED = 64  # number of single-gradient factors that are tried
_EQUAL = 1e-3  # Heuristic: rank weights closer than this are equal


@dataclass(frozen=True)
class WeightedMeanFit:
    """Fit of the optimizer gradients as a weighted mean of the ranks' local gradients.

    Holds the weights and, for each parameter (by index) that does not fit them, the ranks that
    deviate, if known.
    """

    weights: tuple[float, ...]
    wrong: dict[int, tuple[int, ...]]
    own: bool = False  # the optimizer received local gradients there
    compared: int = 0

    @property
    def is_even(self) -> bool:
        """True if all ranks are weighted equally."""
        mean = sum(self.weights) / len(self.weights)
        return all(abs(one - mean) <= _EQUAL * abs(mean) for one in self.weights)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Indices of ranks with weight 0."""
        most = max(abs(one) for one in self.weights)
        return tuple(r for r, one in enumerate(self.weights) if abs(one) <= _EQUAL * most)


class LeafGradients:
    """Gradients of one parameter since its `.grad` was last cleared."""

    def __init__(self, audit: "Audit", parameter: torch.Tensor, number: int) -> None:
        self._audit, self.parameter, self.number = audit, parameter, number
        self.given: torch.Tensor | None = None
        self.passes = 0
        self.is_divided = type(parameter.data) is not torch.Tensor
        # Number of replicas of each shard, and offset of this rank's shard.
        self.copies, self.start = _shard_offset(parameter) if self.is_divided else (0, 0)
        self.unit = unit_roundoff(parameter.dtype)
        self.whole = None if self.is_divided else parameter  # receives backward's gradients
        self._hook = None if self.whole is None else LeafHook(self.whole, self._accept_gradient)
        self._holds: Callable[[], bool] = lambda: False

    def arm(self, wholes: Mapping[int, "UnshardedTensor"]) -> None:
        """Start an audited step. `wholes` maps a parameter's id to its unsharded tensor."""
        self.given, self.passes = None, 0
        found = wholes.get(id(self.parameter))
        if found is not None and _is_plain(found.tensor):
            self._holds = found.holds
            if found.tensor is not self.whole:
                self.whole = found.tensor
                self.unit = max(self.unit, found.unit, unit_roundoff(self.whole.dtype))
                self._hook = LeafHook(self.whole, self._accept_gradient)
        if self._hook is not None:
            self._hook.put_back()

    def got(self) -> float:
        """Return the projection of the optimizer gradient; NaN if there is no gradient."""
        grad: Any = self.parameter.grad
        if self.is_divided and grad is not None and hasattr(grad, "to_local"):
            grad = grad.to_local()
        if grad is None or type(grad) is not torch.Tensor:
            return math.nan
        return float(self._audit.projected(grad, self)[0])

    def _accept_gradient(self, gradient: torch.Tensor) -> None:
        if not self._audit.armed:
            return
        if not self._is_held():
            self.given, self.passes = None, 0
        found = self._audit.projected(gradient, self)
        self.given = found if self.given is None else self.given + found
        self.passes += 1

    def _is_held(self) -> bool:
        """Return True if the recorded local gradient is still part of `.grad`.

        A shard may be zero although the whole gradient is not; the step is then unknown.
        """
        grads: list[Any] = [t.grad for t in (self.parameter, self.whole) if t is not None]
        parts = [g.to_local() if hasattr(g, "to_local") else g for g in grads if g is not None]
        if not self.is_divided or not parts or self.given is None:
            return self._holds() or any(bool(part.any()) for part in parts)
        if all(part.numel() and not part.any() for part in parts) and not self._holds():
            self.given = torch.full_like(self.given, math.nan)
        return True


class UnshardedTensor(NamedTuple):
    """The unsharded tensor that a model computes with, for a parameter of fully_shard."""

    tensor: torch.Tensor
    unit: float  # unit roundoff of its reduction, if known
    holds: Callable[[], bool]  # returns True if gradients are held back


class Audit:
    """Measures the armed steps of one optimizer. `wire` is the dtype in which the reduction rounds,
    if that is not the dtype of the gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, wire: torch.dtype | None) -> None:
        self._wire, self._signs = wire, dict[torch.device, torch.Tensor]()
        self.armed, self._step = False, 0
        self.rows: list[list[float]] = []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = [p for p in parameters if p.requires_grad and (_is_plain(p) or _shard_offset(p)[0])]
        self._others = len(parameters) - len(known)  # sharded in another way, or not trained
        self.leaves = [LeafGradients(self, p, n) for n, p in enumerate(known)]
        self._handle: Any = optimizer.register_step_pre_hook(lambda *_: self._measure())

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [leaf.parameter for leaf in self.leaves]

    @property
    def is_early(self) -> bool:
        """True at the first step, when the unsharded tensors of fully_shard are not known yet."""
        return self._step == 1 and any(leaf.whole is None for leaf in self.leaves)

    @property
    def left_out(self) -> int:
        """Number of parameters that are not audited."""
        waits = sum(leaf.whole is None for leaf in self.leaves)
        return self._others + (0 if self.is_early else waits)

    def arm(self, step: int, model: torch.nn.Module | None = None) -> None:
        """Measure the next step of an optimizer. `model` is the model that it trains, if known."""
        self.armed, self._step, self.rows = True, step, []
        wholes = {} if model is None else dict(_wholes_in(model))
        for leaf in self.leaves:
            leaf.arm(wholes)

    def close(self) -> None:
        self.armed = False
        self._handle.remove()

    def roundoff(self, leaf: LeafGradients) -> float:
        """Return the unit roundoff of the dtype in which a gradient is rounded."""
        return max(leaf.unit, unit_roundoff(self._wire)) if self._wire else leaf.unit

    def projected(self, gradient: torch.Tensor, leaf: LeafGradients) -> torch.Tensor:
        """Return the ±1 projection of a gradient or shard, and its L1 norm, in float64."""
        flat = gradient.detach().reshape(-1)
        total = leaf.parameter.numel()  # for a DTensor, of the unsharded tensor
        begin, end = 0, total
        if (part := _sampled_elements(self.roundoff(leaf))) < total:
            begin = _seed_of(self._step, leaf.number) % (total - part + 1)
            end = begin + part
        start = leaf.start if flat.numel() < total else 0
        low, high = max(start, begin), min(start + flat.numel(), end)
        found = torch.zeros(2, dtype=torch.float64, device=flat.device)
        signs = self._signs_on(flat.device)
        while low < high:
            chunk, at = divmod(low - begin, _CHUNK)
            exact = flat[low - start : min(high, low - at + _CHUNK) - start].double()
            sign = 1 if _seed_of(leaf.number, chunk) % 2 else -1
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
        """Measure before a step. If optimizers call each other's step, the innermost step is
        measured.
        """
        if not self.armed:
            return
        self.rows = []
        for leaf in self.leaves:
            given = [0.0, 0.0] if leaf.given is None else leaf.given.tolist()
            self.rows.append([*given, float(leaf.passes), leaf.got()])


def _is_plain(parameter: torch.Tensor) -> bool:
    return type(parameter.data) is torch.Tensor


def _shard_offset(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the number of replicas of each shard and this rank's offset in elements, for a
    parameter sharded by rows over all ranks; zeros for other shardings.
    """
    places: Any = getattr(parameter, "placements", None)
    if places is None or not any(one.is_shard() for one in places):
        return 0, 0
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    by_rows = all(one.is_replicate() or one.is_shard(0) for one in places)
    if not by_rows or mesh.size() != dist.get_world_size():
        return 0, 0
    copies = math.prod(mesh.size(n) for n, one in enumerate(places) if one.is_replicate())
    return copies, compat.shard_offset(parameter)[0] * math.prod(parameter.shape[1:])


def _wholes_in(model: torch.nn.Module) -> Iterator[tuple[int, UnshardedTensor]]:
    for module in model.modules():
        _, dtype = compat.fsdp2_dtypes(module)
        unit = 0.0 if dtype is None else unit_roundoff(dtype)
        holding = {id(own): holds for own, holds in compat.fsdp2_holding(module)}
        for own, whole in compat.fsdp2_parameters(module):
            if whole is not None:
                yield id(own), UnshardedTensor(whole, unit, holding[id(own)])


def sum_projections(rows: Sequence[Sequence[Sequence[float]]], copies: Sequence[int]) -> list[Rows]:
    """Sum the optimizer projections of sharded parameters over ranks. `copies` is the number of
    replicas of each shard; 0 for parameters that every rank holds completely.
    """
    found = [[list(row) for row in one] for one in rows]
    for place, several in enumerate(copies):
        if several:
            total = sum(one[place][-1] for one in rows) / several
            for own in found:
                own[place][-1] = total
    return found


def _sampled_elements(roundoff: float) -> int:
    """Return the number of projected elements at which a wrong factor is still visible in the mean
    of two ranks.
    """
    return max(_LEAST, int((_VISIBLE * (2 + 1 + _ROUNDINGS) * roundoff) ** -2))


def _seed_of(*about: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:6], "big")


def judge(
    rows: Sequence[Sequence[Sequence[float]]], roundoff: Sequence[float]
) -> WeightedMeanFit | None:
    """Fit the measurements of all ranks, or return None if there are none. For each rank and
    parameter, `rows` has the local projection, the L1 norm, the number of passes, and the optimizer
    projection. This is a pure function, so all ranks reach the same conclusion.
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
    for weights in (_fit_equal(given, got, bound), _fit_weights(given, got, bound)):
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
    return WeightedMeanFit(tuple(weights.tolist()), bad, own, len(places))


def _fit_equal(given: torch.Tensor, got: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return equal weights, scaled by the factor that fits most gradients.

    The candidates are the factors that fit single gradients. The best candidate is refined by least
    squares over the gradients that it fits.
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


def _fit_weights(
    given: torch.Tensor, got: torch.Tensor, bound: torch.Tensor
) -> torch.Tensor | None:
    """Fit a separate weight for each rank (a script may weight by samples or tokens), by least
    squares over the gradients that fit. Return None if these are too few.
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
