"""Computes the mistakes that the comparisons of a step would have revealed, given their bounds.

The summands of a mean are the ranks' recorded local gradients, or recomputed ones if any rank's
gradients were not recorded. Nothing is trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from distcheck.judge.oracles.compression import CompressedForm
from distcheck.judge.oracles.forms import (
    Combination,
    EitherForm,
    Form,
    FullBatchBuffers,
    GradientForms,
    WithinNorm,
)
from distcheck.machine.numerics import as_float64, distance, every_nth_number, real_parts
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import number
from distcheck.records.layers import BITWISE, ROUNDING
from distcheck.records.mistakes import MISTAKES, NOTHING, RevealedMistakes

_SAMPLE = 1 << 12
_MOST_TWINS = 16
# Derived: 32 u of float64. If c = 0, a mistaken result is rounded once or twice here; if c > 0, c b
# exceeds the roundings of the sum.
_IN_DOUBLE = 2.0**-48


@dataclass(frozen=True)
class MeanSummands:
    """The summands of a mean, all in float64.

    gradients  [W, n]
    shares     [W]; the mean is `shares @ gradients`
    own        [W]; the factor of a rank's gradient if the rank keeps its local gradient
    weights    [W]; the rank weights, with sum 1
    bound      elementwise [n], or a number for the L2 norm; with `expected`, only the distance of a
               mistaken sum from its exact value
    expected   [n]; the compared bits, if any
    """

    gradients: torch.Tensor
    shares: torch.Tensor
    own: torch.Tensor
    weights: torch.Tensor
    bound: torch.Tensor | float
    expected: torch.Tensor | None = None


def mistakes_shown_by_sum(
    parts_at: Callable[[int], MeanSummands],
    *,
    elements: int,
    ranks: Sequence[int],
    before: torch.Tensor | None = None,
    others: Sequence[torch.Tensor] = (),
) -> RevealedMistakes:
    """Return the mistakes that comparing one tensor at one step would have revealed.

    `parts_at(k)` returns every k-th element. `before` is the tensor after the previous step.
    `others` are recorded tensors of parameters with the same shape at this step. `ranks` are the
    numbers of the ranks in the report.
    """
    stride = max(1, -(-elements // _SAMPLE))
    found = _apply_mistake(parts_at(stride), stride, ranks, before, others)
    if stride > 1 and not is_complete(found, ranks):
        return _apply_mistake(parts_at(1), 1, ranks, before, others)
    return found


def is_complete(found: RevealedMistakes, ranks: Sequence[int]) -> bool:
    """Return True if every possible mistake of every rank would be revealed."""
    return all(len(found.shown[m]) >= _most_variants(m, ranks) for m in found.shown)


def _most_variants(mistake: str, ranks: Sequence[int]) -> int:
    return len(ranks) if MISTAKES[mistake].of_ranks else 1


def _apply_mistake(
    parts: MeanSummands,
    stride: int,
    ranks: Sequence[int],
    before: torch.Tensor | None,
    others: Sequence[torch.Tensor],
) -> RevealedMistakes:
    world, shares = len(ranks), parts.shares.unsqueeze(1)
    scaled = parts.gradients * shares
    mean = scaled.sum(0)

    def shows(left: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
        """Return, per row of `left` [k, n], if a comparison fails; `c` is [k, 1] or a number."""
        if parts.expected is None:
            apart, allowed = (left - mean).abs(), (1.0 + c) * parts.bound
        else:
            apart = (left - parts.expected).abs()
            allowed = c * parts.bound + _IN_DOUBLE * parts.expected.abs()
        if isinstance(parts.bound, torch.Tensor):
            return (apart > allowed).any(1)
        norms: torch.Tensor = apart.norm(dim=1, keepdim=True) > allowed
        return norms.squeeze(1)

    rest = (1.0 - parts.weights).unsqueeze(1)
    of_rank: Mapping[str, torch.Tensor] = {
        "missing-sync": shows(parts.gradients * parts.own.unsqueeze(1), 0.0),
        "lost-rank": shows(mean - scaled, 1.0) & shows((mean - scaled) / rest, 1.0 / rest),
        "doubled-rank": shows(mean + scaled, 1.0 + _relative_contributions(scaled, parts)),
    }
    of_all = {
        "times-world": shows(world * mean.unsqueeze(0), float(world)),
        "divided-by-world": shows(mean.unsqueeze(0) / world, 1.0),
    }
    if before is not None:
        of_all["stale"] = shows(every_nth_number(stride, before).double().unsqueeze(0), 0.0)
    if others:
        rows = torch.stack(
            [every_nth_number(stride, other).double() for other in others[:_MOST_TWINS]]
        )
        of_all["other-parameter"] = shows(rows, 0.0).all().reshape(1)
    shown = {
        name: tuple(rank for rank, seen in zip(ranks, rows.tolist(), strict=True) if seen)
        for name, rows in of_rank.items()
    }
    shown |= {name: (0,) if bool(row[0]) else () for name, row in of_all.items()}
    return RevealedMistakes(
        shown=shown,
        scale=number(_least_scale(mean, parts.bound)),
        zero=not bool(parts.gradients.any()),
        alike=bool((parts.gradients == parts.gradients[0]).all()),
        steps=1 if any(shown[name] for name in shown if MISTAKES[name].of_exchange) else 0,
    )


def _relative_contributions(scaled: torch.Tensor, parts: MeanSummands) -> torch.Tensor:
    """Return each rank's relative contribution to the roundings: [W, n], or [W, 1] for norms."""
    sizes = scaled.abs()
    if not isinstance(parts.bound, torch.Tensor):
        sizes = sizes.norm(dim=1, keepdim=True)
        share = sizes / scaled.abs().sum(0).norm()
    else:
        share = sizes / sizes.sum(0)
    return torch.maximum(share.nan_to_num(nan=1.0), parts.weights.unsqueeze(1))


def _least_scale(mean: torch.Tensor, bound: torch.Tensor | float) -> float:
    """Return the smallest relative error of a factor that fails the comparison: 2 b / |m|."""
    if not isinstance(bound, torch.Tensor):
        size = float(torch.where(mean.isfinite(), mean, 0.0).norm())
        return 2.0 * bound / size if size else float("inf")
    ratios = 2.0 * bound / mean.abs()
    ratios = ratios[ratios.isfinite() & mean.isfinite()]
    return float(ratios.min()) if ratios.numel() else float("inf")


def mistakes_shown_at_step(
    trace: TraceReader, step: int, layers: Mapping[str, GradientForms]
) -> dict[str, tuple[RevealedMistakes | None, ...]]:
    """Return, by layer, the mistakes that comparing each parameter's reduced gradient at a step
    would reveal; None if only one rank has data, since there is nothing to synchronize.

    `trace` has only ranks with data. The bitwise layer is stricter than the rounding bound, so each
    mistake that the rounding bound reveals is tried only once.
    """
    indices = range(len(trace.layout.model.parameters))
    looks = {layer: _Look(trace, step, forms) for layer, forms in layers.items()}
    found = {
        layer: tuple(look.at(index) for index in indices)
        for layer, look in looks.items()
        if layer != BITWISE
    }
    if BITWISE in layers:
        look = looks[BITWISE]
        by_bound = found.get(ROUNDING) or tuple(look.at(index) for index in indices)
        found[BITWISE] = tuple(
            shown
            if shown is None or is_complete(shown, trace.ranks)
            else look.at(index, in_bits=True)
            for index, shown in enumerate(by_bound)
        )
    return found


def mistakes_shown_by_exchange(
    ranks: Sequence[int], forms: GradientForms
) -> tuple[RevealedMistakes, ...]:
    """Return the mistakes that would be revealed in code that communicates in forward: no
    communication, or a wrong factor. `forms.computed` are each rank's gradients without
    communication.
    """
    return tuple(
        mistakes_shown_by_tensor(ranks, forms.of(index), [own[index] for own in forms.computed])
        for index in range(len(forms.computed[0]))
    )


def mistakes_shown_by_buffers(after: FullBatchBuffers) -> tuple[RevealedMistakes, ...]:
    """Return the same as `mistakes_shown_by_exchange` for the buffers of such code."""
    return tuple(
        mistakes_shown_by_tensor(after.ranks, near, [own[index] for own in after.alone])
        for index, near in enumerate(after.buffers)
    )


def mistakes_shown_by_tensor(
    ranks: Sequence[int], form: Form | None, own: Sequence[torch.Tensor | None]
) -> RevealedMistakes:
    """Return the mistakes that comparing a tensor reveals; `own`: without communication."""
    if isinstance(form, EitherForm):
        form = form.first
    if not isinstance(form, WithinNorm):
        form = WithinNorm(torch.zeros(()), 0.0)
        own = [None] * len(ranks)
    right, allowed = as_float64(form.expected), form.tolerance
    size = float(right.norm())
    left = [torch.zeros_like(right) if one is None else as_float64(one) for one in own]
    apart = [not distance(one, right) <= allowed for one in left]
    shown = {
        "missing-sync": tuple(rank for rank, seen in zip(ranks, apart, strict=True) if seen),
        "times-world": (0,) if size * (len(ranks) - 1) > allowed else (),
        "divided-by-world": (0,) if size * (1 - 1 / len(ranks)) > allowed else (),
    }
    return RevealedMistakes(
        shown=shown,
        scale=number(allowed / size) if size else "inf",
        zero=not size,
        alike=not any(apart),
        steps=int(any(apart)),
    )


class _Look:
    """One layer's comparisons of a step."""

    def __init__(self, trace: TraceReader, step: int, forms: GradientForms) -> None:
        self._trace, self._step, self._forms = trace, step, forms
        self._ranks = trace.ranks

    def at(self, index: int, *, in_bits: bool = False) -> RevealedMistakes | None:
        """Return the mistakes that comparing one gradient would reveal, by a bound or bitwise."""
        if len(self._ranks) < 2:
            return None
        if self._forms.compresses:
            return self._mistakes_in_compression(index)
        return self._mistakes_in_mean(index, in_bits=in_bits)

    def _mistakes_in_mean(self, index: int, *, in_bits: bool) -> RevealedMistakes:
        seen, shared = self._local_gradients(index), self._forms.shares
        present = next((gradient for gradient in seen if gradient is not None), None)
        if present is None:
            return NOTHING
        if present.numel() == 0:
            return msgspec.structs.replace(NOTHING, absent=False)
        own = [torch.zeros_like(present) if g is None else g for g in seen]
        per_rank = partial(torch.tensor, dtype=torch.float64, device=present.device)
        shares = per_rank(shared.mean_weights)
        if not bool(shares.isfinite().all()):
            return NOTHING  # a loss multiplied by zero: no rank's part is known
        limit = self._forms.limit(index, own)

        def parts_at(stride: int) -> MeanSummands:
            bits = self._forms.every(index, stride) if in_bits else None
            return MeanSummands(
                gradients=torch.stack(
                    [every_nth_number(stride, gradient).double() for gradient in own]
                ),
                shares=shares,
                # A GradScaler's scale is removed from a rank's local gradient, too.
                own=1.0 / per_rank(shared.loss_scales),
                weights=per_rank(shared.weights) / len(self._ranks),
                bound=limit(stride),
                expected=bits,
            )

        found = mistakes_shown_by_sum(
            parts_at,
            elements=real_parts(present).numel(),
            ranks=self._ranks,
            before=self._previous_gradient(index),
            others=self._same_shape_gradients(index),
        )
        there = [g is not None and bool(g.any()) for g in seen]
        return msgspec.structs.replace(
            found,
            absent_on_some=any(g is None for g in seen),
            zero_on_some=any(there) and not all(there),
            sizes=self._range_of(index),
        )

    def _local_gradients(self, index: int) -> list[torch.Tensor | None]:
        """Return every rank's local gradient, as recorded if all ranks' were, else recomputed."""
        ranks = range(len(self._ranks))
        seen = [self._trace.tensor(r, Kind.LOCAL_GRADIENT, self._step, index) for r in ranks]
        if all(gradient is not None for gradient in seen):
            return seen
        return [gradients[index] for gradients in self._forms.computed]

    def _range_of(self, index: int) -> tuple[float, ...]:
        result = self._trace.tensor(0, Kind.GRADIENT, self._step, index)
        if result is None or not result.numel():
            return ()
        least, most = torch.aminmax(numbers := real_parts(result))
        if not bool((most - least).isfinite()):
            least, most = torch.aminmax(numbers.nan_to_num(0.0, posinf=0.0, neginf=0.0))
        largest = max(-float(least), float(most))
        return (largest, largest) if largest else ()

    def _previous_gradient(self, index: int) -> torch.Tensor | None:
        step = self._step
        return self._trace.tensor(0, Kind.GRADIENT, step - 1, index) if step else None

    def _same_shape_gradients(self, index: int) -> list[torch.Tensor]:
        """Return the recorded gradients of the other parameters with the same shape and dtype."""
        specs = self._trace.layout.model.parameters
        alike = [
            at
            for at, spec in enumerate(specs)
            if at != index and (spec.shape, spec.dtype) == (specs[index].shape, specs[index].dtype)
        ]
        found = [self._trace.tensor(0, Kind.GRADIENT, self._step, at) for at in alike]
        return [tensor for tensor in found if tensor is not None]

    def _mistakes_in_compression(self, index: int) -> RevealedMistakes:
        """Return the same if a compression is accepted: each mistake is tried on rank 0's result,
        from which the part of a rank is removed, or to which it is added.
        """
        form, ranks = self._forms.of(index), self._ranks
        result = self._trace.tensor(0, Kind.GRADIENT, self._step, index)
        if not isinstance(form, CompressedForm) or result is None or not result.numel():
            return NOTHING
        world = len(ranks)
        own = [torch.zeros_like(result) if g is None else g for g in self._local_gradients(index)]
        parts = [
            form.without(result, number, share * gradient.double())
            for number, (share, gradient) in enumerate(
                zip(self._forms.shares.mean_weights, own, strict=True)
            )
        ]

        def fails(left: torch.Tensor) -> bool:
            return bool(form.fit(left.to(result.dtype)).why)

        right = result.double()
        shown = {
            "missing-sync": tuple(r for r, g in zip(ranks, own, strict=True) if fails(g)),
            "lost-rank": tuple(
                r for r, part in zip(ranks, parts, strict=True) if fails(right - part)
            ),
            "doubled-rank": tuple(
                r for r, part in zip(ranks, parts, strict=True) if fails(right + part)
            ),
            "times-world": (0,) if fails(right * world) else (),
            "divided-by-world": (0,) if fails(right / world) else (),
        }
        before = self._previous_gradient(index)
        if before is not None:
            shown["stale"] = (0,) if fails(before) else ()
        counts = any(shown[name] for name in shown if MISTAKES[name].of_exchange)
        return RevealedMistakes(
            shown=shown,
            scale="inf",
            zero=not any(bool(g.any()) for g in own),
            alike=all(torch.equal(g, own[0]) for g in own),
            steps=int(counts),
        )


def mistakes_shown_by_combination(
    ranks: Sequence[int], combined: Combination, before: torch.Tensor | None
) -> RevealedMistakes | None:
    """Return the mistakes that comparing a combination of tensors would reveal. Ranks of weight 0
    contribute nothing.
    """
    part = [index for index, weight in enumerate(combined.weights) if weight]
    if len(part) < 2:
        return None
    terms = [combined.terms[index] for index in part]
    shares = torch.tensor([combined.weights[index] for index in part], dtype=torch.float64)

    def parts_at(stride: int) -> MeanSummands:
        return MeanSummands(
            gradients=torch.stack([every_nth_number(stride, term).double() for term in terms]),
            shares=shares,
            own=torch.ones_like(shares),
            weights=shares / shares.sum(),
            bound=combined.found.bound.reshape(-1)[::stride],
        )

    elements, among = real_parts(terms[0]).numel(), [ranks[i] for i in part]
    return (
        mistakes_shown_by_sum(parts_at, elements=elements, ranks=among, before=before)
        if elements
        else NOTHING
    )
