"""Measures a failed step of a model-parallel layout against a single process."""

from collections.abc import Collection, Sequence

import msgspec
import torch

from distcheck.judge.diagnosis.measurements import (
    LayoutFacts,
    LayoutParameter,
    WrongOutputs,
    WrongRegion,
)
from distcheck.judge.fitting import fit_least_squares
from distcheck.judge.oracles import full_batch_bound
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import as_float64
from distcheck.recordings.recording import Kind
from distcheck.records.mesh import Mesh

# Heuristic, relative to a tensor's largest error: below it, an element is right.
_RIGHT_BESIDE = 1e-3
# Heuristic, relative to a gradient's norm: the residual of a match. Far above float32 rounding, far
# below the effect of one sample.
_LEFT_OVER = 1e-4


def measure_layout(at: AtStep, mesh: Mesh) -> LayoutFacts:
    found, last = [], -1
    for index in range(len(at.specs)):
        parameter = _Measuring(at, mesh, index).measured()
        if parameter is not None:
            found.append(parameter)
            last = index
    modules = [_module(spec.name) for spec in at.specs]
    wrong = {parameter.module for parameter in found}
    later = dict.fromkeys(m for m in modules[last + 1 :] if m not in wrong)
    expected = full_batch_bound.loss(at)
    losses = [] if expected.remark else full_batch_bound.recorded_losses(at)
    allowed = max(expected.bound, expected.rounding)
    return LayoutFacts(
        step=at.step,
        axes=mesh.axes,
        micro_batches=at.contract.micro_batches,
        total=len(at.specs),
        by_tokens=any(header.tokens is not None for header in at.shares.headers),
        parameters=tuple(found),
        right=tuple(later),
        loss_is_wrong=any(not abs(loss - expected.expected) <= allowed for loss in losses),
        loss=max(losses, key=lambda loss: abs(loss - expected.expected), default=0.0),
        expected_loss=expected.expected,
        outputs=_wrong_outputs(at, mesh),
        form=at.communicating_form,
        apart=len(losses) > 1 and not max(losses) - min(losses) <= 2 * allowed,
    )


def _factor(actual: torch.Tensor, right: torch.Tensor) -> float:
    """Return the least-squares factor of the right tensor, or 0.0 if that is zero."""
    fitted = fit_least_squares([(actual, right)])
    return fitted.factors[0] if fitted is not None else 0.0


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _wrong_outputs(at: AtStep, mesh: Mesh) -> WrongOutputs | None:
    """Return the wrong outputs of the first rank that has some, relative to the right ones."""
    expected = full_batch_bound.outputs(at) if at.references.whole.layout.outputs else None
    if expected is None:
        return None
    for rank in range(mesh.world):
        place = mesh.coordinate(rank, "data")
        held = at.references.whole.tensor(rank, Kind.OUTPUT, at.step, 0)
        form = expected.expected[place]
        right = as_float64(form.expected)
        allowed = max(form.tolerance, form.rounding)
        if held is None or not bool(right.any()):
            continue
        found = as_float64(held[: len(form.expected)])
        if not float((found - right).norm()) <= allowed:
            return _describe_outputs(rank, found.flatten(1), right.flatten(1))
    return None


def _describe_outputs(rank: int, found: torch.Tensor, right: torch.Tensor) -> WrongOutputs:
    off, norm = found - right, float(right.norm())
    factor = _factor(found, right)
    mean = off.mean(1, keepdim=True)
    nearest = torch.cdist(found, right).argmin(1)
    return WrongOutputs(
        rank=rank,
        factor=factor if float((found - factor * right).norm()) <= _LEFT_OVER * norm else None,
        shifted=found.shape[1] > 1 and float((off - mean).norm()) <= _LEFT_OVER * float(off.norm()),
        reordered=float((found - right[nearest]).norm()) <= _LEFT_OVER * norm,
        distance=float(off.norm()) / norm,
    )


class GradientVersions:
    """The ranks' versions of a gradient, and the right one; ranks in `without` lack it."""

    def __init__(
        self, held: Sequence[torch.Tensor | None], expected: torch.Tensor | None, mesh: Mesh,
        allowed: float = 0.0, without: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._held = [None if h is None else as_float64(h) for h in held]
        self._expected = None if expected is None else as_float64(expected)
        self._mesh, self._allowed, self._without = mesh, allowed, without

    def of(self, name: str) -> LayoutParameter | None:
        """Return the description of a wrong gradient, or None if it is right on every rank."""
        expected = self._expected
        if expected is None:
            return None
        absent = tuple(
            rank for rank, h in enumerate(self._held) if h is None and rank not in self._without
        )
        wrong = tuple(
            rank
            for rank, held in enumerate(self._held)
            if held is not None and not float((held - expected).norm()) <= self._allowed
        )
        if not wrong and not absent:
            return None
        found = LayoutParameter(name=name, module=_module(name), wrong=wrong, absent=absent)
        if absent or not bool(expected.any()):
            return found
        held = [self._held[rank] for rank in wrong]
        tensors = [tensor for tensor in held if tensor is not None]
        return self._with_relations(found, tensors, expected)

    def _with_relations(
        self, found: LayoutParameter, held: Sequence[torch.Tensor], expected: torch.Tensor
    ) -> LayoutParameter:
        # Derived: an error of norm `allowed` changes a fitted factor by at most allowed / norm.
        return msgspec.structs.replace(
            found,
            factor=self._common_factor(held, expected),
            factor_error=self._allowed / float(expected.norm()),
            shares=self._axis_of_shares(expected),
            mixed=self._axis_of_mixed(held, expected),
            region=_region(held[0], expected, self._allowed),
            distance=max(float((one - expected).norm() / expected.norm()) for one in held),
        )

    def _is_close(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return float((one - other).norm()) <= max(self._allowed, _LEFT_OVER * float(other.norm()))

    def _all_near(self, held: Sequence[torch.Tensor], other: torch.Tensor) -> bool:
        return bool(other.any()) and all(self._is_close(one, other) for one in held)

    def _common_factor(self, held: Sequence[torch.Tensor], expected: torch.Tensor) -> float | None:
        factors = [_factor(one, expected) for one in held]
        if max(factors) - min(factors) > _LEFT_OVER * max(map(abs, factors), default=0.0):
            return None
        factor = factors[0]
        fits = all(self._is_close(one, factor * expected) for one in held)
        return factor if fits and abs(factor) > _LEFT_OVER else None

    def _axis_of_shares(self, expected: torch.Tensor) -> str:
        """Return the axis along which ranks hold different summands, or ""."""
        for axis, _ in self._mesh.axes:
            groups = [
                [self._held[r] for r in ranks if r not in self._without]
                for ranks in self._mesh.along(axis)
            ]
            groups = [group for group in groups if group]
            if any(len(g) < 2 for g in groups) or any(t is None for g in groups for t in g):
                continue
            sums = [torch.stack([t for t in group if t is not None]).sum(0) for group in groups]
            even = expected / max(1, len(groups[0]) if groups else 1)
            apart = any(not self._is_close(t, even) for t in groups[0] if t is not None)
            if apart and all(self._is_close(total, expected) for total in sums):
                return axis
        return ""

    def _axis_of_mixed(self, held: Sequence[torch.Tensor], expected: torch.Tensor) -> str:
        """Return the axis whose ranks have different shards but hold their mean or sum, or ""."""
        for axis, size in self._mesh.axes:
            if axis == "data" or size < 2:
                continue
            for dim in (d for d in range(expected.dim()) if expected.shape[d] % size == 0):
                pieces = torch.stack(expected.chunk(size, dim))
                for one in (pieces.mean(0), pieces.sum(0)):
                    if self._all_near(held, torch.cat([one] * size, dim)):
                        return axis
        return ""


class _Measuring(GradientVersions):
    """One parameter at one step."""

    def __init__(self, at: AtStep, mesh: Mesh, index: int) -> None:
        self._at, self._index = at, index
        whole = at.references.whole
        held = [whole.tensor(r, Kind.GRADIENT, at.step, index) for r in range(mesh.world)]
        super().__init__(held, at.full_batch.gradients[index], mesh)
        self._allowed = self._allowed_error()

    def _allowed_error(self) -> float:
        if self._expected is None:
            return 0.0
        expected, tolerance = self._expected, full_batch_bound.tolerance(self._at, self._index)
        errors = [float((h - expected).norm()) for h in self._held if h is not None]
        error = max(errors, default=0.0)
        if error <= tolerance:
            return tolerance
        rounding = full_batch_bound.gradient_rounding(self._at, self._index, error, tolerance)
        return max(tolerance, rounding)

    def measured(self) -> LayoutParameter | None:
        """Return the description of a wrong gradient, or None if it is right on every rank."""
        return self.of(self._at.specs[self._index].name)

    def _with_relations(
        self, found: LayoutParameter, held: Sequence[torch.Tensor], expected: torch.Tensor
    ) -> LayoutParameter:
        earlier = self._previous_gradient()
        return msgspec.structs.replace(
            super()._with_relations(found, held, expected),
            shard=self._is_own_shard(),
            even=self._is_even_mean(held),
            earlier=earlier is not None and self._all_near(held, earlier),
            added=earlier is not None and self._all_near(held, expected + earlier),
            unexchanged=self._is_unexchanged(),
            lost=self._lost_passes(held, expected),
        )

    def _is_own_shard(self) -> bool:
        """Return True if every rank holds the gradient of its own samples only."""
        if self._mesh.data < 2:
            return False
        for rank, held in enumerate(self._held):
            own = self._at.shards[self._mesh.coordinate(rank, "data")].gradients[self._index]
            if held is None or own is None or not self._is_close(held, as_float64(own)):
                return False
        return True

    def _is_unexchanged(self) -> bool:
        """Return True if code that communicates by itself holds its uncommunicated result."""
        if not self._at.communicating_form:
            return False
        pairs = zip(self._held, self._at.unexchanged, strict=True)
        return all(
            held is not None
            and own[self._index] is not None
            and self._is_close(held, as_float64(alone))
            for held, own in pairs
            if (alone := own[self._index]) is not None
        )

    def _is_even_mean(self, held: Sequence[torch.Tensor]) -> bool:
        """Return True if data coordinates are weighted equally although their sizes differ."""
        if len(set(self._at.shares.counts)) < 2 and not self._at.communicating_form:
            return False
        parts = [shard.gradients[self._index] for shard in self._at.shards]
        present = [as_float64(part) for part in parts if part is not None]
        return len(present) == len(parts) and self._all_near(held, torch.stack(present).mean(0))

    def _lost_passes(self, held: Sequence[torch.Tensor], expected: torch.Tensor) -> tuple[int, ...]:
        """Return the micro-batch whose gradient is missing, if there is one data coordinate."""
        if self._at.contract.micro_batches < 2 or self._mesh.data > 1:
            return ()
        passes = self._at.references.shards.passes(0, self._at.step)
        for number, of_pass in enumerate(passes):
            part = of_pass[self._index]
            if part is None:
                continue
            if self._all_near(held, expected - as_float64(part)):
                return (number,)
        return ()

    def _previous_gradient(self) -> torch.Tensor | None:
        if self._at.step == 0:
            return None
        before = self._at.references.at(self._at.step - 1).full_batch.gradients[self._index]
        # The model is now in that step's state; the next query loads its own.
        return None if before is None else as_float64(before)


def _region(held: torch.Tensor, expected: torch.Tensor, allowed: float) -> WrongRegion | None:
    """Return the box with all wrong elements, if it is not the whole tensor."""
    apart = (held - expected).abs()
    most = float(apart.max())
    places = (apart > max(_RIGHT_BESIDE * most, allowed)).nonzero()
    if not len(places) or not held.dim():
        return None
    low, high = places.min(0).values.tolist(), (places.max(0).values + 1).tolist()
    box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    inside = held[box].numel()
    # Heuristic: some units of an activation are zero, and their elements always right.
    if inside == held.numel() or len(places) < inside / 4:
        return None
    right = expected[box]
    factor = _factor(held[box], right)
    fits = float((held[box] - factor * right).norm()) <= _LEFT_OVER * float(right.norm())
    cuts = ", ".join(
        f"{a}:{b}" if b - a < size else ":"
        for a, b, size in zip(low, high, held.shape, strict=True)
    )
    return WrongRegion(where=f"[{cuts}]", factor=factor if fits else None)
