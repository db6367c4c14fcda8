"""What the comparisons of a step would have shown, from the bound that each of them has.

The parts of a mean are the ranks' own gradients as they were recorded; where a rank's were not
seen, those that were computed again. Nothing is trained for it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import torch

from distcheck.judge.checks.simplest_mistakes import Parts, is_complete, shown_by
from distcheck.judge.oracles.forms import AfterBatch, Either, Form, GradientForms, Near
from distcheck.judge.oracles.low_rank import Projection, projected
from distcheck.machine.numerics import distance, every, real_parts, wide
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import number
from distcheck.records.layers import BITWISE, ROUNDING
from distcheck.records.mistakes import MISTAKES, NOTHING, Shown


def of_step(
    trace: TraceReader, step: int, layers: Mapping[str, GradientForms]
) -> dict[str, tuple[Shown | None, ...]]:
    """What comparing each parameter's synchronised gradient by each layer would show, at a step.
    None where one rank alone has data: there is nothing to exchange.

    `trace` is that of the ranks with data. X asks for more than R does: what R's bound shows, bits
    show, so what both ask is asked once.
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


def of_exchange(ranks: Sequence[int], forms: GradientForms) -> tuple[Shown, ...]:
    """The same of code that exchanges by itself: whether what it leaves without an exchange, or
    with another factor, would have shown. `forms.computed` is what it leaves on each rank then.
    """
    return tuple(
        of_unexchanged(ranks, forms.of(index), [own[index] for own in forms.computed])
        for index in range(len(forms.computed[0]))
    )


def of_buffers(after: AfterBatch) -> tuple[Shown, ...]:
    """The same of the buffers that such code leaves."""
    return tuple(
        of_unexchanged(after.ranks, near, [own[index] for own in after.alone])
        for index, near in enumerate(after.buffers)
    )


def of_unexchanged(
    ranks: Sequence[int], form: Form | None, own: Sequence[torch.Tensor | None]
) -> Shown:
    """What comparing one tensor would show, of which ranks have `own` without an exchange."""
    if isinstance(form, Either):
        form = form.first
    if not isinstance(form, Near):
        form = Near(torch.zeros(()), 0.0)
        own = [None] * len(ranks)
    right, allowed = wide(form.expected), form.tolerance
    size = float(right.norm())
    left = [torch.zeros_like(right) if one is None else wide(one) for one in own]
    apart = [not distance(one, right) <= allowed for one in left]
    shown = {
        "no-sync": tuple(rank for rank, seen in zip(ranks, apart, strict=True) if seen),
        "times-world": (0,) if size * (len(ranks) - 1) > allowed else (),
        "divided-by-world": (0,) if size * (1 - 1 / len(ranks)) > allowed else (),
    }
    return Shown(
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

    def at(self, index: int, *, in_bits: bool = False) -> Shown | None:
        """What comparing one parameter's gradient would show, by a bound or by its bits."""
        if len(self._ranks) < 2:
            return None
        if self._forms.projects:
            return self._of_projection(index)
        return self._of_mean(index, in_bits=in_bits)

    def _of_mean(self, index: int, *, in_bits: bool) -> Shown:
        seen, shared = self._own(index), self._forms.shares
        present = next((gradient for gradient in seen if gradient is not None), None)
        if present is None:
            return NOTHING
        if present.numel() == 0:
            return msgspec.structs.replace(NOTHING, absent=False)
        own = [torch.zeros_like(present) if g is None else g for g in seen]
        per_rank = partial(torch.tensor, dtype=torch.float64, device=present.device)
        shares = per_rank(shared.in_mean)
        if not bool(shares.isfinite().all()):
            return NOTHING  # a loss that was multiplied by zero: no rank's part is known
        limit = self._forms.limit(index, own)

        def parts_at(stride: int) -> Parts:
            bits = self._forms.every(index, stride) if in_bits else None
            return Parts(
                gradients=torch.stack([every(stride, gradient).double() for gradient in own]),
                shares=shares,
                # Where a rank keeps its gradient, a GradScaler's scale is taken back all the same.
                own=1.0 / per_rank(shared.loss_scales),
                weights=per_rank(shared.weights) / len(self._ranks),
                bound=limit(stride),
                expected=bits,
            )

        found = shown_by(
            parts_at,
            elements=real_parts(present).numel(),
            ranks=self._ranks,
            before=self._before(index),
            others=self._others(index),
        )
        there = [g is not None and bool(g.any()) for g in seen]
        return msgspec.structs.replace(
            found,
            absent_on_some=any(g is None for g in seen),
            zero_on_some=any(there) and not all(there),
            sizes=self._sizes(index),
        )

    def _own(self, index: int) -> list[torch.Tensor | None]:
        """What backward left on each rank, as it was recorded where it was seen on every rank, and
        otherwise computed again.
        """
        ranks = range(len(self._ranks))
        seen = [self._trace.tensor(r, Kind.LOCAL_GRADIENT, self._step, index) for r in ranks]
        if all(gradient is not None for gradient in seen):
            return seen
        return [gradients[index] for gradients in self._forms.computed]

    def _sizes(self, index: int) -> tuple[float, ...]:
        result = self._trace.tensor(0, Kind.GRADIENT, self._step, index)
        if result is None or not result.numel():
            return ()
        least, most = torch.aminmax(numbers := real_parts(result))
        if not bool((most - least).isfinite()):
            least, most = torch.aminmax(numbers.nan_to_num(0.0, posinf=0.0, neginf=0.0))
        largest = max(-float(least), float(most))
        return (largest, largest) if largest else ()

    def _before(self, index: int) -> torch.Tensor | None:
        step = self._step
        return self._trace.tensor(0, Kind.GRADIENT, step - 1, index) if step else None

    def _others(self, index: int) -> list[torch.Tensor]:
        """The recorded gradients of the other parameters of this one's shape."""
        specs = self._trace.layout.model.parameters
        alike = [
            at
            for at, spec in enumerate(specs)
            if at != index and (spec.shape, spec.dtype) == (specs[index].shape, specs[index].dtype)
        ]
        found = [self._trace.tensor(0, Kind.GRADIENT, self._step, at) for at in alike]
        return [tensor for tensor in found if tensor is not None]

    def _of_projection(self, index: int) -> Shown:
        """The same where a low-rank exchange is accepted: what each mistake leaves is tried on the
        comparison itself, projected on the directions that rank 0's result has.
        """
        form, ranks = self._forms.of(index), self._ranks
        result = self._trace.tensor(0, Kind.GRADIENT, self._step, index)
        if not isinstance(form, Projection) or result is None or not result.numel():
            return NOTHING
        mean, world = form.mean, len(ranks)
        own = [torch.zeros_like(result) if g is None else g for g in self._own(index)]
        pairs = zip(self._forms.shares.in_mean, own, strict=True)
        scaled = [share * g.double() for share, g in pairs]
        keep = _projection(result, form.rank)

        def fails(left: torch.Tensor) -> bool:
            return bool(projected(left.to(result.dtype), form).why)

        shown = {
            "no-sync": tuple(r for r, g in zip(ranks, own, strict=True) if fails(g)),
            "lost-rank": tuple(
                r for r, part in zip(ranks, scaled, strict=True) if fails(keep(mean - part))
            ),
            "doubled-rank": tuple(
                r for r, part in zip(ranks, scaled, strict=True) if fails(keep(mean + part))
            ),
            "times-world": (0,) if fails(keep(mean) * world) else (),
            "divided-by-world": (0,) if fails(keep(mean) / world) else (),
        }
        before = self._before(index)
        if before is not None:
            shown["stale"] = (0,) if fails(before) else ()
        counts = any(shown[name] for name in shown if MISTAKES[name].of_exchange)
        return Shown(
            shown=shown,
            scale="inf",
            zero=not any(bool(g.any()) for g in own),
            alike=all(torch.equal(g, own[0]) for g in own),
            steps=int(counts),
        )


def _projection(result: torch.Tensor, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the exchange keeps of a tensor, as far as its result shows: its columns' own space."""
    rows = result.shape[0] if result.dim() else 1
    if result.dim() < 2 or min(rows, result.numel() // rows) <= rank:
        return lambda tensor: tensor
    columns, values, _ = torch.linalg.svd(result.double().reshape(rows, -1), full_matrices=False)
    # Measured allowance: beyond its rank, a product of that rank in float32 was measured to have
    # singular values of up to 4e-8 of the first. Decides only which mistakes are tried.
    if float(values[rank]) > 1e-3 * float(values[0]):
        return lambda tensor: tensor  # this step compressed nothing
    basis = columns[:, :rank]
    return lambda tensor: (basis @ (basis.T @ tensor.reshape(rows, -1))).reshape(tensor.shape)


def of_average(
    ranks: Sequence[int],
    updates: Sequence[torch.Tensor],
    bound: torch.Tensor,
    before: torch.Tensor | None,
) -> Shown | None:
    """What comparing an average of the ranks' parameters would show."""
    if len(ranks) < 2:
        return None
    even = updates[0].new_full((len(ranks),), 1.0 / len(ranks), dtype=torch.float64)

    def parts_at(stride: int) -> Parts:
        return Parts(
            gradients=torch.stack([every(stride, update).double() for update in updates]),
            shares=even,
            own=torch.ones_like(even),
            weights=even,
            bound=bound.reshape(-1)[::stride],
        )

    elements = real_parts(updates[0]).numel()
    return (
        shown_by(parts_at, elements=elements, ranks=ranks, before=before) if elements else NOTHING
    )
