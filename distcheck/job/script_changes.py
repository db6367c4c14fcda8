"""Gradients that a script changes between backward and `optimizer.step()`, also in a single
process.

The reference is the same script, so a mistake that does not depend on the ranks passes every
comparison with the reference: a flipped sign, a gradient of an earlier step, two swapped
parameters. The ranks' local gradients reveal it, because a script that changes nothing passes their
mean to the optimizer. A change becomes a warning. If it is known to be intended (clipping,
centralization, weight decay, unscaling, ascent), it becomes a note.

    local  g_0, g_1      mean  m = (g_0 + g_1) / 2      optimizer  y
    y = m          no message
    y = -m         wrong-sign; ascent if the objective is the script's own
    y = m[t - 1]   stale-gradient
    y = m + 0.1 p  weight decay of 0.1, a note
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from math import hypot, isclose

import msgspec
import torch

from distcheck.job.causes import causes_of_wrong_gradients
from distcheck.job.checks.exchange import factors_of_sum_losses, gradients_at_step, loss_factors
from distcheck.job.step_view import JobStep
from distcheck.judge.diagnosis.measurements import SAME_FACTOR
from distcheck.judge.diagnosis.wording import number_text
from distcheck.judge.fitting import fit_least_squares
from distcheck.machine.numerics import NotBoundedError, as_float64
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.recording import Kind
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause

_SAME = "a single process does the same, so comparing with it does not reveal this"
# Synchronization mistakes; other explanations may be intended by a script.
_MISTAKES = {
    "stale-gradient", "accumulated-gradient", "wrong-parameter-order", "bucket-reused-in-flight",
    "duplicated-rank", "single-rank-gradient", "wrong-sign", "low-precision", "noise",
}  # fmt: skip


class ChangedGradients:
    """A step whose optimizer gradients are not the mean of the local gradients. All ranks agree
    with the reference at this step, so rank 0 represents all ranks.
    """

    def __init__(self, view: JobStep) -> None:
        self.view, self.job, self.step = view, view.job, view.step

    @cached_property
    def rows(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """By parameter: the optimizer gradients, the mean of the local gradients, and its bound, in
        float64.
        """
        found = []
        for index in range(len(self.view.specs)):
            held, interval = self.view.reduced(0, index), self.view.interval(index)
            if held is not None:
                found.append((as_float64(held), interval.mean, interval.bound))
        return found

    @cached_property
    def factor(self) -> float | None:
        """The factor, if all gradients are the same multiple of the mean; else None."""
        fitted = fit_least_squares([(given, mean) for given, mean, _ in self.rows])
        if fitted is None:
            return None
        (factor,) = fitted.factors
        return factor if self.is_right(lambda mean: factor * mean, abs(factor)) else None

    def is_right(self, made: Callable[[torch.Tensor], torch.Tensor], most: float = 1.0) -> bool:
        """Return True if gradients equal `made(mean)` within `most` times the bound and two
        roundings.
        """
        return all(
            bool(((given - made(mean)).abs() <= (1 + 1e-6) * most * bound).all())
            for given, mean, bound in self.rows
        )

    def norm(self) -> float:
        """Return the L2 norm of the optimizer gradients."""
        return hypot(*(float(given.norm()) for given, _, _ in self.rows))


def steps_with_changed_gradients(
    job: JobRecording, steps: Collection[int], kind: Kind
) -> Iterator[ChangedGradients]:
    """Yield the steps whose gradients at a stage are neither the mean nor the sum of the local
    gradients.
    """
    for step in sorted(steps):
        records = job.at(step)
        by_value = any(clip.kind != "norm" for record in records for clip in record.clips)
        if by_value or any(record.skipped for record in records):
            continue
        view = gradients_at_step(job, step, kind, of_all=True)
        try:
            one = ChangedGradients(view)
            if one.rows and not one.is_right(lambda mean: mean) and not _is_sum(one):
                yield one
        except NotBoundedError:
            continue


def _is_sum(one: ChangedGradients) -> bool:
    world = one.job.world
    return one.is_right(lambda mean: world * mean, world)


def remarks(job: JobRecording, steps: Collection[int]) -> tuple[list[Diagnosis], str]:
    """Return a warning for the first unrecognized change at steps that agree with the reference,
    and a sentence about the recognized ones.
    """
    kinds = (Kind.EXCHANGED, Kind.GRADIENT)  # changes before clipping are clipped, too
    found = next(
        filter(None, ([*steps_with_changed_gradients(job, steps, kind)] for kind in kinds)), []
    )
    meant = [recognized_change(one, found) for one in found]
    unknown = next((one for one, known in zip(found, meant, strict=True) if not known), None)
    known = next(filter(None, meant), "")
    note = f"the script {known}, and so does a single process" if known else ""
    return [_remark(unknown)] if unknown is not None else [], note


def _remark(one: ChangedGradients) -> Diagnosis:
    causes = causes_of_wrong_gradients(one.job, one.step, one.view.kind)
    named = [diagnosis for diagnosis in causes if diagnosis.cause in _MISTAKES]
    if named:
        first = named[0]
        return msgspec.structs.replace(first, evidence=f"{first.evidence}; {_SAME}")
    how = "a gradient other than the mean of the ranks' local gradients"
    if one.factor is not None:
        how = f"{number_text(one.factor)}x the mean of the ranks' local gradients"
    return name_cause(
        "gradients-modified-before-step",
        f"step {one.step}: the script or its comm hook modifies gradients before "
        f"optimizer.step(), which receives {how}; {_SAME}",
        "meant",
    )


def recognized_change(one: ChangedGradients, all_of: Collection[ChangedGradients]) -> str:
    """Return a known intended change as a phrase (a verb and its object), or ""."""
    ways = (_unscales, _recognize_ascent, _clips_by_norm, _clips_by_value, _centralizes, _decays)
    return next(filter(None, (way(one, all_of) for way in ways)), "")


def _unscales(one: ChangedGradients, _: Collection[ChangedGradients]) -> str:
    """Recognize a scaled loss whose gradients were unscaled."""
    factors = loss_factors(one.job, one.step) or factors_of_sum_losses(one.job, one.step)
    if one.factor is None or not factors or len(set(factors)) > 1:
        return ""
    is_undone = isclose(one.factor * factors[0], 1.0, rel_tol=SAME_FACTOR)
    return f"divides gradients by a loss scale of {number_text(factors[0])}" if is_undone else ""


def _recognize_ascent(one: ChangedGradients, _: Collection[ChangedGradients]) -> str:
    """Recognize ascent. Only an objective that the script computes itself counts, not torch's loss
    functions.
    """
    of_torch = any(p.losses for record in one.job.at(one.step) for p in record.trained)
    is_negated = one.is_right(lambda mean: -mean)
    return "negates gradients, as for gradient ascent" if is_negated and not of_torch else ""


def _clips_by_norm(one: ChangedGradients, all_of: Collection[ChangedGradients]) -> str:
    """Recognize custom clipping: all gradients that became shorter have the same norm
    afterwards.
    """
    if one.factor is None or not 0 < one.factor < 1:
        return ""
    norm, others = one.norm(), [other for other in all_of if other is not one]
    rounded = float(f"{norm:.0e}")
    # Heuristic: one norm in a thousand has a single significant digit by chance.
    has_one_digit = isclose(norm, rounded, rel_tol=1e-4)
    again = [o for o in others if o.factor is not None and not isclose(o.factor, one.factor)]
    if has_one_digit or (again and all(isclose(o.norm(), norm, rel_tol=1e-3) for o in again)):
        return f"clips gradients to a norm of {number_text(rounded if has_one_digit else norm)}"
    return ""


def _clips_by_value(one: ChangedGradients, _: Collection[ChangedGradients]) -> str:
    most = max(float(given.abs().max()) for given, _, _ in one.rows if given.numel())
    is_clipped = most > 0 and one.is_right(lambda mean: mean.clamp(-most, most))
    return f"clips each element of a gradient to {number_text(most)}" if is_clipped else ""


def _centralizes(one: ChangedGradients, _: Collection[ChangedGradients]) -> str:
    def centralized(mean: torch.Tensor) -> torch.Tensor:
        return mean - mean.mean(dim=tuple(range(1, mean.dim())), keepdim=True)

    # Derived: a row's mean is off by at most the mean of its elements' bounds, plus one rounding
    # per element, each within its own bound.
    is_it = all(
        bool(((given - (centralized(mean) if mean.dim() > 1 else mean)).abs() <= room).all())
        for given, mean, bound in one.rows
        for room in [bound + bound.amax() * (2 if mean.dim() > 1 else 0)]
    )
    return "centralizes gradients" if is_it else ""


def _decays(one: ChangedGradients, _: Collection[ChangedGradients]) -> str:
    """Recognize weight decay: a multiple of the parameter was added to its gradient."""
    kept = one.job.tensors(0, one.step)
    before = [kept.get(f"before/{spec.name}") for spec in one.view.specs]
    if len(before) != len(one.rows) or any(p is None for p in before):
        return ""
    pairs = [(row, as_float64(p)) for row, p in zip(one.rows, before, strict=True) if p is not None]
    if any(p.shape != row[0].shape for row, p in pairs):
        return ""
    moved = [(given - mean, p) for (given, mean, _), p in pairs if not _is_near(given, mean, p)]
    fitted = fit_least_squares(moved) if moved else None
    if fitted is None:
        return ""
    (decay,) = fitted.factors
    room = hypot(*(float(bound.norm()) for (_, _, bound), _ in pairs))
    room += abs(decay) * 1e-6 * hypot(*(float(p.norm()) for _, p in pairs))
    return f"adds {decay:.4g} times each parameter to its gradient" if (fitted.left <= room) else ""


def _is_near(given: torch.Tensor, mean: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if nothing was added. (Biases often have no weight decay.)"""
    return bool(torch.isclose(given, mean, rtol=1e-5, atol=0.0).all()) or not bool(parameter.any())
