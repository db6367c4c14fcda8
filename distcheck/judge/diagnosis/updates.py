"""Measures the results of steps: wrong optimizer updates, averages of parameters, and buffers of
repeated forward passes. Runs in a judge.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import isclose, sqrt

import torch

from distcheck.judge.diagnosis.measured import StepExpectation, StepView
from distcheck.judge.diagnosis.measurements import CompressionFacts, StepFacts, UpdateFacts
from distcheck.judge.diagnosis.measuring import StepMeasuring
from distcheck.judge.fitting import fit_least_squares
from distcheck.judge.oracles import rounding_bound
from distcheck.judge.oracles.averaging import mean_over_ranks
from distcheck.judge.oracles.compression import CompressedForm
from distcheck.judge.oracles.forms import Form, GradientForms, WithinBound
from distcheck.judge.oracles.low_rank import Projection
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import as_float64, unit_roundoff
from distcheck.recordings.recording import Kind

# Heuristic, relative residual of an update that is a multiple of the right one.
_SAME = 1e-5
# Heuristic, relative to a squared norm: above float32 rounding, far below the contribution of a
# parameter's gradient.
_CLOSE = 1e-4
# Heuristic: far above float32 rounding of a moving average, far below its change.
_SAME_STEP = 1e-4
_MOST_SUBSETS = 12  # Heuristic: parameters whose subsets are tried; with more, several would fit


def measure_update(expectation: StepExpectation) -> UpdateFacts | None:
    """Measure the parameters that differ from the optimizer's update of recorded values. Return
    None if none differs, or if the trace lacks the values before the update.
    """
    trace, step = expectation.trace, expectation.step
    specs = trace.layout.model
    ranks, parameters, state = [], dict[str, int](), dict[str, None]()
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rank in range(trace.layout.world):
        try:
            wanted = expectation.references.update.run(rank, step)
        except NotRecordedError:
            return None
        wrong = False
        for index, spec in enumerate(specs.parameters):
            after, expected = (
                trace.tensor(rank, Kind.PARAMETER, step + 1, index),
                wanted[Kind.PARAMETER][index],
            )
            if after is None or expected is None or torch.equal(after, expected):
                continue
            wrong, parameters[spec.name] = True, parameters.get(spec.name, 0) + 1
            before = trace.tensor(rank, Kind.PARAMETER, step, index)
            assert before is not None, "the update was computed from it"
            moved, right, held = (as_float64(t).reshape(-1) for t in (after, expected, before))
            rows.append((moved - held, right - held, held))
        for index, spec in enumerate(specs.optimizer):
            if expectation.references.update.is_sharded(index):
                continue
            found, expected = (
                trace.tensor(rank, Kind.OPTIMIZER, step + 1, index),
                wanted[Kind.OPTIMIZER][index],
            )
            if (found is None) != (expected is None) or (
                found is not None and expected is not None and not torch.equal(found, expected)
            ):
                wrong, state[spec.name] = True, None
        ranks += [rank] if wrong else []
    if not ranks:
        return None
    factor, decay, rest = _made_of(rows)
    times, counted = 1, tuple[str, ...]()
    if not decay and rest < _CLOSE:
        times, counted = replicas_in_clipping_norm(expectation, factor)
    return UpdateFacts(
        step=step,
        ranks=tuple(trace.ranks[rank] for rank in ranks),
        parameters=tuple(parameters),
        state=tuple(state),
        factor=factor,
        decay=decay,
        rest=rest,
        unchanged=bool(rows) and not any(bool(taken.any()) for taken, _, _ in rows),
        owners=expectation.contract.optimizer_state == "sharded"
        and not state
        and set(parameters.values()) == {trace.layout.world - 1},
        norms=clipped_by_shard(expectation),
        counted=counted,
        times=times,
    )


def replicas_in_clipping_norm(
    expectation: StepExpectation, factor: float
) -> tuple[int, tuple[str, ...]]:
    """Return the parameters with a wrong weight in the clipping norm, and the weight, if exactly
    one set explains the factor of the update. Without a layout, that set is all parameters.

    With |g| the total norm, the update of clipped gradients is |g| / n of the right one for a norm
    n. If all k ranks add the squares of tensors that each holds whole, n^2 is |g|^2 plus k - 1
    times these squares.
    """
    mesh = expectation.references.mesh
    training, step = expectation.training, expectation.step
    names = [spec.name for spec in expectation.trace.layout.model.parameters]
    if training.clip_norm is None or not 0 < factor < 1 - _SAME:
        return 1, ()
    held = [expectation.trace.tensor(0, Kind.GRADIENT, step, i) for i in range(len(names))]
    squares = [0.0 if g is None else float(as_float64(g).square().sum()) for g in held]
    total, world = sum(squares), expectation.trace.layout.world
    share = world if mesh is None else mesh.world // mesh.data
    if share < 2 or sqrt(total) <= training.clip_norm:
        return 1, ()
    own = dict(zip(names, squares, strict=True))
    fits = tensors_in_norm(own, factor, share, some=mesh is not None)
    return (share, fits[0]) if len(fits) == 1 else (1, ())


def tensors_in_norm(
    squares: Mapping[str, float], factor: float, times: int, *, some: bool
) -> list[tuple[str, ...]]:
    """Return the sets of tensors that explain a norm which is the right one over `factor`, if their
    squares are included `times` times: all tensors, or if `some` a subset of up to 12.
    """
    total = sum(squares.values())
    excess = total * (factor**-2 - 1) / (times - 1)
    sizes = range(1, len(squares) + 1) if some and len(squares) <= _MOST_SUBSETS else [len(squares)]
    return [
        chosen
        for size in sizes
        for chosen in combinations(squares, size)
        if isclose(sum(squares[name] for name in chosen), excess, abs_tol=_CLOSE * total)
    ]


def clipped_by_shard(expectation: StepExpectation) -> tuple[float, ...]:
    """Return the norms of the shards, if clipping each shard by its norm explains an update of
    plain SGD.

    A shard with norm n changes |g| / n times as much as it should, |g| being the total norm.
    Elements therefore form groups by this factor, and each factor times its group's norm is |g|.
    """
    trace, step = expectation.trace, expectation.step
    clips = expectation.training.clip_norm is not None
    if not clips or expectation.contract.optimizer_state != "cut":
        return ()
    wanted = expectation.references.update.run(0, step)[Kind.PARAMETER]
    ratios, gradients, square = list[torch.Tensor](), list[torch.Tensor](), 0.0
    for index, expected in enumerate(wanted):
        before, after, gradient = (
            trace.tensor(0, kind, slot, index)
            for kind, slot in (
                (Kind.PARAMETER, step), (Kind.PARAMETER, step + 1), (Kind.GRADIENT, step),
            )
        )  # fmt: skip
        if before is None or after is None or gradient is None or expected is None:
            continue
        start, end, wanted_end, own = (
            as_float64(t).reshape(-1) for t in (before, after, expected, gradient)
        )
        square += float(own.square().sum())
        right = wanted_end - start
        # Heuristic: elements that changed by at least 4096 roundings, so that a factor is known.
        known = right.abs() > 4096 * unit_roundoff(before.dtype) * start.abs()
        ratios.append(((end - start) / right)[known])
        gradients.append(own[known])
    if not ratios or not len(factors := torch.cat(ratios)):
        return ()
    order = factors.argsort()
    factors, held = factors[order], torch.cat(gradients)[order]
    # Heuristic: far above the rounding of a factor, far below the difference of two shards.
    cuts = ((factors[1:] - factors[:-1]) > 1e-3 * factors[1:].abs()).nonzero().flatten() + 1
    groups = list(zip(factors.tensor_split(cuts), held.tensor_split(cuts), strict=True))
    norms = tuple(float(part.norm()) for _, part in groups)
    fits = all(
        # Heuristic: elements that hardly changed are in no group, and are a few percent of the
        # norm.
        isclose(float(factor.mean()) * norm, sqrt(square), rel_tol=0.05)
        for (factor, _), norm in zip(groups, norms, strict=True)
    )
    return norms if fits and 1 < len(norms) <= trace.layout.world else ()


def _made_of(
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> tuple[float, float, float]:
    """Fit an update as a factor times the right one plus a multiple of the parameters; return both
    factors and the relative residual.
    """
    if not rows:
        return 1.0, 0.0, 1.0
    taken, wanted, held = (torch.cat(parts) for parts in zip(*rows, strict=True))
    if not bool(taken.isfinite().all() and wanted.isfinite().all()):
        return 1.0, 0.0, 1.0
    alone, both = fit_least_squares([(taken, wanted)]), fit_least_squares([(taken, wanted, held)])
    if alone is None:
        return 0.0, 0.0, 1.0
    if both is None or alone.share <= _SAME or both.share > alone.share / 4:
        return alone.factors[0], 0.0, alone.share
    return both.factors[0], both.factors[1], both.share


def measure_average(expectation: StepExpectation) -> StepFacts:
    """Measure a wrong average of parameters like a gradient: each rank's update stands for its
    local gradient, and the average for the reduced gradient. Raises NotRecordedError.
    """
    return StepMeasuring(_Averaged(expectation), []).facts()


def measure_compression(expectation: StepExpectation) -> CompressionFacts | None:
    """Explain rank 0's gradients that a compression did not make: by a common factor, or by a
    mistake of the design. A projection y = f P M has f = |y|^2 / <y, M>.
    """
    forms = rounding_bound.gradients(expectation)
    if forms is None:
        return None
    wrong = list[tuple[int, torch.Tensor]]()
    factors, why = [float(len(forms.shares.ranks)), 1.0 / len(forms.shares.ranks)], ""
    for index, spec in enumerate(expectation.specs):
        form = forms.of(index)
        result = expectation.trace.tensor(0, Kind.GRADIENT, expectation.step, index)
        if form is None or result is None or not (found := _misfit(as_float64(result), form)):
            continue
        why = why or f"{spec.name}: {found}"
        wrong.append((index, as_float64(result)))
        if isinstance(form, Projection) and len(wrong) == 1:
            along = float((wrong[0][1] * form.mean).sum())
            factors += [float(wrong[0][1].norm()) ** 2 / along] if along else []

    def explained(expected: GradientForms, factor: float = 1.0) -> bool:
        pairs = [(y / factor, expected.of(index)) for index, y in wrong]
        return bool(wrong) and all(form is not None and not _misfit(y, form) for y, form in pairs)

    factor = next((factor for factor in factors if factor and explained(forms, factor)), 0.0)
    design, mistake = expectation.references.design, ""
    if design is not None and not factor:
        mistakes = design.gradient_mistakes(expectation)
        mistake = next((words for words, expected in mistakes if explained(expected)), "")
    return CompressionFacts(factor, mistake, why)


def _misfit(result: torch.Tensor, form: Form) -> str:
    """Return the reason that a gradient is not as expected, or ""."""
    if isinstance(form, CompressedForm):
        return form.fit(result).why
    assert isinstance(form, WithinBound)
    apart = (result - form.mean).abs()
    if bool((apart <= form.bound).all()):
        return ""
    worst = int((apart / form.bound).argmax())
    error, bound = (float(tensor.reshape(-1)[worst]) for tensor in (apart, form.bound))
    return f"not the mean: element {worst} differs by {error:.3g}, and the bound is {bound:.3g}"


def buffers_updated_twice(expectation: StepExpectation) -> bool:
    """Return True if every wrong buffer has its value after a second forward pass on the same
    batch. One pass changes a moving average from b to b + m (x - b). A second pass on the same
    batch changes it by (1 - m) times that difference, and a counter by the same number again.
    """
    trace, step = expectation.trace, expectation.step
    wrong = 0
    for rank, shard in enumerate(expectation.shards):
        for index, expected in enumerate(shard.buffers):
            before = trace.tensor(rank, Kind.BUFFER, step, index)
            actual = trace.tensor(rank, Kind.BUFFER, step + 1, index)
            if before is None or actual is None:
                return False
            if torch.equal(actual, expected):
                continue
            wrong += 1
            if not _continues_same_way(before.double(), expected.double(), actual.double()):
                return False
    return wrong > 0


def _continues_same_way(before: torch.Tensor, once: torch.Tensor, twice: torch.Tensor) -> bool:
    found = fit_least_squares([(twice - once, once - before)])
    if found is None:
        return False
    (share,), rest = found.factors, found.left / float((once - before).norm())
    return 0 < share <= 1 + _SAME_STEP and rest <= _SAME_STEP


class _Averaged(StepView):
    """A step view in which averaged parameters take the place of reduced gradients."""

    def __init__(self, at: StepExpectation) -> None:
        self._at, self.step, self.specs = at, at.step, at.specs
        self._update = cache(at.references.update.run)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._at.ranks

    @property
    def weights(self) -> list[float]:
        return [1.0] * len(self.ranks)

    @property
    def unscaled(self) -> list[float]:
        return [1.0] * len(self.ranks)

    @property
    def dtype(self) -> str:
        return self._at.dtype

    @property
    def wire(self) -> str | None:
        return self._at.wire

    def local(self, rank: int, index: int) -> torch.Tensor | None:
        """Return a rank's update. Raises NotRecordedError."""
        return self._update(rank, self.step)[Kind.PARAMETER][index]

    def seen(self, rank: int, index: int) -> None:
        return None

    def reduced(self, rank: int, index: int) -> torch.Tensor | None:
        return self._at.trace.tensor(rank, Kind.PARAMETER, self.step + 1, index)

    def digest(self, rank: int, index: int) -> bytes:
        return self._at.trace.entry(rank, Kind.PARAMETER, self.step + 1, index).digest

    def interval(self, index: int, *, wire: str | None = None) -> Interval | None:
        parts = [self.local(rank, index) for rank in range(len(self.ranks))]
        present = [part for part in parts if part is not None]
        found = mean_over_ranks(present) if present else None
        if found is None or wire is None:
            return found
        return replace(found, bound=torch.zeros_like(found.bound))
