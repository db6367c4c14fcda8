"""Required results of compressors with a memory (`--accept sparse`, `--accept error-feedback`).

Every rank r adds to its contribution w_r g_r (its gradient, weighted as in the mean) the part of
earlier steps that it has not sent, compresses the sum, and remembers the rest:

    a_r = w_r g_r + m_r,     y = sum_r C(a_r),     m_r <- a_r - C(a_r)

(Seide et al., Interspeech 2014; Stich et al., arXiv:1809.07599; Karimireddy et al.,
arXiv:1901.09847.) Without feedback m_r is always zero. Code that averages instead of weighting has
a_r and m_r that are W times as large, and sends the same. The gradients and y are recorded; m_r is
not. It is zero at first, and the part of a_r that was sent at a step determines m_r for the next
one, so no access to the code's memory and no assumption about its messages is needed:

sparse    C(a) keeps some elements of a, and is zero elsewhere. Element i of y is therefore the sum
          of a_r[i] over a subset of the ranks, which is found by trying all 2^W. Every rank must
          send K elements, or a fraction K of them, of each tensor (or of all parameters together,
          `whole`); with `top`, the largest. (Aji and Heafield, arXiv:1704.05021; Lin et al.,
          arXiv:1712.01887.)
sign      C(a) = c sign(a), with one c > 0 for each rank and tensor: the mean of |a| (EF-SGD,
          EF-signSGD) or its root mean square (1-bit Adam, arXiv:2102.02888), over the tensor or
          over all parameters. c is fitted to y, and compared with these four.

A tensor that every rank sends completely (a bias; all, in the first steps) is right as well; if no
tensor was compressed in any step, the verdict is `unknown`.

In floating point, with u of the gradients' dtype: weighting takes two roundings and adding the
memory one, so the code's a_r is within gamma(4) (|w_r g_r| + |m_r|) of the one here, plus the error
of m_r. The sum over ranks and its division add W + 3 roundings. A difference a - C(a) is one
rounding more (zero, if C(a) = a). `errors` carries these bounds from step to step. An element for
which several subsets fit (a_r[i] is zero, or less than the rounding of the others) may have been
sent or not: its memory is 0 or a_r[i], and its error includes both. The same holds for the sign of
an element that is zero within its error. An element at the K-th largest magnitude, within errors,
may be sent or not.

A sum of n magnitudes in any order has a relative error of gamma(n): so c is compared within
gamma(n + 8), but every element of y with the fitted c within gamma(W + 6).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any

import torch

from distcheck.machine.numerics import gamma

# Derived: the share of a compressed tensor must differ from 1.0, that of a complete one.
_NEARLY_ALL = 1.0 - 2.0**-20


@dataclass(frozen=True)
class CompressedFit:
    """The fit of a result. `error` and `bound` are L2 norms, `kept` is the fraction of the mean's
    norm in the result (1.0 for the mean itself), and `why` is "" if it is right.
    """

    error: float
    bound: float
    kept: float
    why: str = ""


class CompressedForm(ABC):
    """The input of one tensor's compression, and the promise of its result.

    mean   the mean over the ranks, with the memory (float64)
    bound  tolerance of the mean itself
    """

    mean: torch.Tensor
    bound: torch.Tensor

    @abstractmethod
    def fit(self, result: torch.Tensor) -> CompressedFit:
        """Return the fit of a result."""

    @abstractmethod
    def without(self, result: torch.Tensor, rank: int, part: torch.Tensor) -> torch.Tensor:
        """Return the part of a result that a rank contributed, given its weighted gradient."""


@dataclass(frozen=True)
class Sent:
    """The parts that ranks sent according to a result, [W, n], with their errors. `why` is the
    reason that they are not those of the promised compressor.
    """

    parts: torch.Tensor
    errors: torch.Tensor
    why: str = ""
    complete: bool = False
    counts: torch.Tensor | None = None  # [2, W]: elements that were sent, and that may have been


@dataclass(frozen=True, kw_only=True)
class SumOfParts(CompressedForm):
    """The input of every rank's compressor, for one tensor.

    parts, errors  [W, n]: a_r and its error, float64
    unit, tiny     unit roundoff and smallest number of the gradients' dtype
    broken         a broken promise about all tensors together, or ""
    """

    mean: torch.Tensor
    bound: torch.Tensor
    parts: torch.Tensor
    errors: torch.Tensor
    unit: float
    tiny: float
    broken: str = field(default="", compare=False)

    @abstractmethod
    def sent(self, result: torch.Tensor) -> Sent:
        """Return the parts that ranks sent, [n] numbers in float64."""

    def fit(self, result: torch.Tensor) -> CompressedFit:
        y = result.to(self.parts.device).double()
        found = self.sent(y.reshape(-1))
        size, mean = float(y.norm()), float(self.mean.norm())
        error = float((y.reshape(-1) - found.parts.sum(0)).norm())
        room = float((self.room(found.parts != 0) + found.errors.sum(0)).norm())
        kept = 1.0 if found.complete else min(_NEARLY_ALL, size / mean if mean else 0.0)
        return CompressedFit(error, room, kept, found.why or self.broken)

    def without(self, result: torch.Tensor, rank: int, part: torch.Tensor) -> torch.Tensor:
        return self.sent(result.double().reshape(-1)).parts[rank].reshape(result.shape)

    def room(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the tolerance of the sum of the masked parts, [n]."""
        world = len(self.parts)
        slack = self.errors + gamma(world + 3, self.unit) * self.parts.abs() + self.tiny
        return (mask * slack).sum(0)

    def memory(self, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of every rank after a step with this result, and its error."""
        found = self.sent(result.to(self.parts.device).double().reshape(-1))
        left = self.parts - found.parts
        rounding = 2 * self.unit * torch.where(left == 0, 0.0, self.parts.abs())
        return left, self.errors * (left != 0) + rounding + found.errors


@dataclass(frozen=True, kw_only=True)
class SparseSum(SumOfParts):
    """Parts of which each rank sends `least` to `most` elements. `least_sent` and `most_kept` [W]
    are magnitudes that no sent element may be below, and no other above; empty if any may be sent.
    """

    least: int
    most: int
    least_sent: torch.Tensor
    most_kept: torch.Tensor
    counts: bool = True  # False if elements are counted over all tensors together

    def sent(self, y: torch.Tensor) -> Sent:
        if bool(((y - self.parts.sum(0)).abs() <= self.room(torch.ones_like(self.parts))).all()):
            return Sent(self.parts, torch.zeros_like(self.parts), complete=True)
        chosen, unsure, fits = self._subsets(y)
        parts = torch.where(chosen, self.parts, 0.0)
        errors = torch.where(unsure, self.parts.abs() + self.errors, 0.0)
        if not bool(fits.all()):
            index = int((~fits).int().argmax())
            given = ", ".join(f"{value:.4g}" for value in self.parts[:, index].tolist())
            why = (
                f"not a sum of ranks' gradients plus memory: element {index} is "
                f"{float(y[index]):.4g}, and the ranks have {given}"
            )
            return Sent(parts, errors, why)
        nonzero = self.parts.abs() > self.errors
        rest = ~chosen & ~unsure & nonzero
        certain = chosen & ~unsure & nonzero
        counts = torch.stack([certain.sum(1), (~rest).sum(1)])
        return Sent(parts, errors, self._why(certain, rest), counts=counts)

    def _subsets(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the elements that each rank sent [W, n], those of which that is uncertain, and
        the elements of y [n] that are a sum at all. For zeros of y, subsets of three ranks and more
        are not tried.
        """
        chosen = torch.zeros_like(self.parts, dtype=torch.bool)
        unsure, fits = chosen.clone(), y == 0
        if self.least_sent.numel():  # the promised elements are tried first
            mask = self.parts.abs() >= self.least_sent.unsqueeze(1)
            fits = (y - (mask * self.parts).sum(0)).abs() <= self.room(mask)
            chosen = mask & fits
            fits |= y == 0
        for places, most in ((y == 0, 2), (y != 0, len(self.parts))):
            here = places.nonzero().squeeze(1)
            some = replace(self, parts=self.parts[:, here], errors=self.errors[:, here])
            known, was, doubt = fits[here], chosen[:, here], unsure[:, here]
            for members in itertools.product((False, True), repeat=len(self.parts)):
                if not 0 < sum(members) <= most:
                    continue
                mask = torch.tensor(members, device=y.device).unsqueeze(1)
                near = (y[here] - (mask * some.parts).sum(0)).abs() <= some.room(mask)
                doubt |= near & known & (mask != was) & (some.parts != 0)
                was = torch.where(near & ~known, mask, was)
                known = known | near
            fits[here], chosen[:, here], unsure[:, here] = known, was, doubt
        return chosen, unsure, fits

    def _why(self, certain: torch.Tensor, rest: torch.Tensor) -> str:
        for rank, (sent, kept) in enumerate(zip(certain, rest, strict=True)):
            count, left = int(sent.sum()), int(kept.sum())
            most = count if self.least_sent.numel() else len(kept) - left  # zeros may be sent
            if self.counts and (count > self.most or (left and most < self.least)):
                return f"{count} elements of rank {rank} instead of {range_text(self)}"
            if not self.least_sent.numel():
                continue
            sizes, errors = self.parts[rank].abs(), self.errors[rank]
            low = sent & (sizes + errors < self.least_sent[rank])
            high = kept & (sizes - errors > self.most_kept[rank])
            if bool(low.any() | high.any()):
                return (
                    f"not the largest elements of rank {rank}: it sent one of magnitude "
                    f"{float(sizes[sent].min()):.4g} and kept one of {float(sizes[kept].max()):.4g}"
                    if count
                    else f"without the largest elements of rank {rank}"
                )
        return ""


def range_text(form: SparseSum) -> str:
    return f"{form.least}" + f" to {form.most}" * (form.most > form.least)


@dataclass(frozen=True, kw_only=True)
class SignSum(SumOfParts):
    """Parts of which each rank sends the signs, with one of `scales` [k, W]."""

    scales: torch.Tensor
    lengths: tuple[int, ...]  # number of elements that each of them was computed from

    def sent(self, y: torch.Tensor) -> Sent:
        everything = torch.ones_like(self.parts)
        if bool(((y - self.parts.sum(0)).abs() <= self.room(everything)).all()):
            return Sent(self.parts, torch.zeros_like(self.parts), complete=True)
        zeros, found = self.parts == 0, list[Sent]()
        for scale, length in zip(self.scales, self.lengths, strict=True):
            for of_zero in (0.0, 1.0, -1.0) if bool(zeros.any()) else (0.0,):
                signs = torch.where(zeros, of_zero, self.parts.sign())
                found.append(self._fit(y, signs, scale, length))
                if not found[-1].why:
                    return found[-1]
        return min(found, key=lambda sent: float((y - sent.parts.sum(0)).norm()))

    def _fit(self, y: torch.Tensor, signs: torch.Tensor, scale: torch.Tensor, length: int) -> Sent:
        world, n = self.parts.shape
        unsure = (self.parts.abs() <= self.errors) & (self.parts != 0)
        sure = ~unsure.any(0)
        free = gamma(length + 8, self.unit) * scale + self.errors.amax(1)
        room, loose = gamma(world + 6, self.unit) * float(scale.sum()) + self.tiny, free
        known = signs[:, sure]
        values = torch.linalg.eigvalsh(known @ known.T)
        # Heuristic: with a worse condition the scales are kept as they are, with their wider bound.
        if n > world and float(values[0]) > 1e-3 * n:
            change = torch.linalg.solve(known @ known.T, known @ (y[sure] - scale @ known))
            if bool((change.abs() <= free).all()):
                scale = scale + change
                loose = torch.full_like(scale, room * (n / float(values[0])) ** 0.5)
        off = (y - scale @ signs).abs()
        allowed = room + float(loose.sum()) + 2 * (unsure * scale.unsqueeze(1)).sum(0)
        errors = loose.unsqueeze(1) + 2 * unsure * scale.unsqueeze(1)
        parts, worst = scale.unsqueeze(1) * signs, float((off - allowed).max())
        if worst <= 0:
            return Sent(parts, errors * (signs != 0))
        index = int((off - allowed).argmax())
        why = (
            "not the signs of ranks' gradients plus memory, each times their mean magnitude: "
            f"element {index} is {float(y[index]):.4g}, expected "
            f"{float((scale @ signs)[index]):.4g}"
        )
        return Sent(parts, errors, why)


def allowed_counts(amount: float, elements: int) -> tuple[int, int]:
    """Return the least and the largest number of elements that `amount` stands for: K of them, or
    below 1 a fraction, rounded down or up, but at least one.
    """
    if amount >= 1:
        return (min(int(amount), elements),) * 2
    exact = amount * elements
    # Derived: far above the rounding of a product in float64, so that 0.1 * 50 is 5.
    return max(1, floor(exact - 1e-6)), min(elements, max(1, ceil(exact + 1e-6)))


def kth_largest(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k-th largest number of each row; infinity for the 0-th."""
    if not 0 < k <= sizes.shape[1]:
        return torch.full((len(sizes),), torch.inf if k <= 0 else 0.0, dtype=sizes.dtype)
    return sizes.kthvalue(sizes.shape[1] - k + 1, dim=1).values


@dataclass(frozen=True)
class Compressor:
    """A compressor by its design: `amount` of elements (0: signs), the `top` ones of each tensor or
    of the `whole` model.
    """

    amount: float = 0.0
    top: bool = True
    whole: bool = False

    def inputs(
        self,
        contributions: Sequence[torch.Tensor],
        memories: Sequence[tuple[torch.Tensor, torch.Tensor]],
        shapes: Sequence[Sequence[int]],
        *,
        unit: float,
        tiny: float,
    ) -> list[SumOfParts]:
        """Return the input of every tensor's compression: weighted gradients [W, n] plus the memory
        (and its error) of earlier steps, if any.
        """
        pairs = list(zip(contributions, memories, strict=True)) if memories else []
        parts = [c + memory for c, (memory, _) in pairs] or list(contributions)
        errors = [
            error + gamma(4, unit) * (c.abs() + memory.abs()) for c, (memory, error) in pairs
        ] or [gamma(4, unit) * c.abs() for c in contributions]
        of_scope = self._scoped(torch.cat(parts, 1), torch.cat(errors, 1)) if self.whole else {}
        forms: list[SumOfParts] = []
        for part, error, shape in zip(parts, errors, shapes, strict=True):
            scoped = of_scope or self._scoped(part, error)
            nothing = torch.zeros(0)
            form = (SparseSum if self.amount else SignSum)(
                mean=part.sum(0).reshape(tuple(shape)), bound=nothing,
                parts=part, errors=error, unit=unit, tiny=tiny, **scoped,
            )  # fmt: skip
            room = form.room(torch.ones_like(part)).reshape(tuple(shape))
            forms.append(replace(form, bound=room))
        return forms

    def _scoped(self, parts: torch.Tensor, errors: torch.Tensor) -> dict[str, Any]:
        """Return the properties of a form that depend on one tensor, or on all."""
        sizes, n = parts.abs(), parts.shape[1]
        if not self.amount:
            scales = torch.stack([sizes.mean(1), (sizes**2).mean(1) ** 0.5])
            return {"scales": scales, "lengths": (n, n)}
        least, most = allowed_counts(self.amount, n)
        limits = (
            kth_largest(sizes - errors, most).clamp(min=0.0) if self.top else sizes[0, :0],
            kth_largest(sizes + errors, least) if self.top else sizes[0, :0],
        )
        return {
            "least": least, "most": most, "least_sent": limits[0], "most_kept": limits[1],
            "counts": not self.whole,
        }  # fmt: skip


def check_counts(forms: Sequence[SumOfParts], results: Sequence[torch.Tensor]) -> str:
    """Return the reason that ranks sent a wrong number of elements of all tensors, or ""."""
    first, total = forms[0], list[torch.Tensor]()
    assert isinstance(first, SparseSum)
    sent = [form.sent(y.double().reshape(-1)) for form, y in zip(forms, results, strict=True)]
    if all(one.complete for one in sent):
        return ""
    for form, one in zip(forms, sent, strict=True):
        nonzero = (form.parts.abs() > form.errors).sum(1)
        every = torch.full_like(nonzero, form.parts.shape[1])
        total.append(torch.stack([nonzero, every]) if one.counts is None else one.counts)
    known = torch.stack(total).sum(0)
    for rank, (count, most) in enumerate(zip(*known.tolist(), strict=True)):
        if count > first.most or most < first.least:
            return f"{count} elements of rank {rank} in all tensors instead of {range_text(first)}"
    return ""


def find_compressor(
    contributions: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    *,
    unit: float,
    tiny: float,
) -> Compressor | None:
    """Return the compressor that made the results of the first step, or None."""

    def fits(compressor: Compressor) -> bool:
        forms = compressor.inputs(contributions, (), shapes, unit=unit, tiny=tiny)
        found = [form.fit(result) for form, result in zip(forms, results, strict=True)]
        if any(fit.why for fit in found) or all(fit.kept == 1.0 for fit in found):
            return False
        return not (compressor.whole and compressor.amount and check_counts(forms, results))

    guesses = [Compressor(), Compressor(whole=True)]
    if any(bool((result == 0).any() & result.any()) for result in results):
        guesses += _sparse_guesses(contributions, results, shapes, unit=unit, tiny=tiny)
    return next((guess for guess in guesses if fits(guess)), None)


def _sparse_guesses(
    contributions: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    *,
    unit: float,
    tiny: float,
) -> Iterator[Compressor]:
    """Yield compressors that send as many elements as were sent: of each tensor, or of all."""
    anything = Compressor(amount=1.0, top=False, whole=True)
    forms = anything.inputs(contributions, (), shapes, unit=unit, tiny=tiny)
    counts = [f.sent(r.double().reshape(-1)).counts for f, r in zip(forms, results, strict=True)]
    known = [
        (count[0], form.parts.shape[1])
        for form, count in zip(forms, counts, strict=True)
        if count is not None
    ]
    if not known:
        return
    every = sum(form.parts.shape[1] for form in forms)
    total = torch.stack([count for count, _ in known]).sum(0) + every - sum(n for _, n in known)
    of_each = [(int(count.max()), n) for count, n in known]
    of_all = [(int(total.max()), every)]
    of_each = [(k, n) for k, n in of_each if k > 1] or of_each
    for top in (True, False):
        for amounts, whole in ((of_each, False), (of_all, True)):
            for amount in (*round_fractions(amounts, exact=top), float(amounts[0][0])):
                if amount > 0:
                    yield Compressor(amount, top, whole)


def round_fractions(counts: Sequence[tuple[int, int]], *, exact: bool) -> list[float]:
    """Return the roundest fraction of n that is k, rounded down or up, for every (k, n). If not
    `exact`, k is at least that (random places may have zeros), and the next round one is returned.
    """
    if not exact:
        least = max(k / n for k, n in counts)
        known = [d * 10.0**-p for p in range(6, 0, -1) for d in (1.0, 2.0, 2.5, 5.0)]
        return [next((f for f in known if f >= least), 0.5)]
    least, most = max((k - 1) / n for k, n in counts), min((k + 1) / n for k, n in counts)
    for digits in range(1, 8):
        scale = 10.0**digits
        inside = range(floor(least * scale) + 1, ceil(most * scale))
        fitting = [
            i / scale
            for i in inside[:1000]
            if all(
                low <= k <= high for k, n in counts for low, high in [allowed_counts(i / scale, n)]
            )
        ]
        if fitting:
            return [fitting[len(fitting) // 2]]
    return []
