"""Fits the reduced gradient of the first step as a weighted sum of the terms of its loss.

Each term has one gradient in the reference (`inside/merged_batch.py`), and the weights of all are 1
if the job is correct. A weight is known within `moved_by` times the tolerance of the gradients. A
fit counts only if every gradient is within its tolerance of the weighted sum, and if every weight
is known: terms with parallel gradients cannot be separated.

A term that is a sum over samples is W times larger in one process with all samples, also if its
weight was chosen for the batch of a rank. No verdict follows from its weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from distcheck.job.checks.reference import gradient_tolerances
from distcheck.job.fitting import Gradients, fit_exactly, gradients_of_rank
from distcheck.job.replaying import Reference
from distcheck.job.settings import GROWTH, IN_TURN, TERM, TERMS
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.recording import Kind
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause

# Chosen: a weight that is known less exactly than this is unknown. W and 1/W differ by more.
_MOST_UNKNOWN = 0.05
# Heuristic: dropout masks differ between samples, which changes a mean or sum by some percent.
_GROWTH = 0.25


@dataclass(frozen=True)
class TermWeights:
    """The weights of the terms at a step; `odd` are those that are not 1. `why`: the reason if they
    are unknown; `certain`: the odd weights are W or 1/W.
    """

    step: int = 0
    weights: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    odd: tuple[int, ...] = ()
    why: str = ""
    certain: bool = False

    def cause(self, world: int) -> Diagnosis | None:
        """Return the cause that names the odd terms; None if there are none or if unknown."""
        if self.why or not self.odd:
            return None
        said = [f"{self._name(one)} has weight {self._weight(one, world)}" for one in self.odd]
        several = len(self.names) - len(self.odd)
        others = "the other terms have" if several > 1 else "the other term has"
        return name_cause("term-scale", f"step {self.step}: {', '.join(said)}; {others} weight 1")

    def _name(self, number: int) -> str:
        place = self.places[number]
        return self.names[number] + (f" ({place})" if place else "")

    def _weight(self, number: int, world: int) -> str:
        weight = self.weights[number]
        if math.isclose(weight, world, rel_tol=_MOST_UNKNOWN):
            return f"{world}, the world size"
        if math.isclose(weight * world, 1, rel_tol=_MOST_UNKNOWN):
            return f"1/{world}, one over the world size"
        return f"{weight:.6g}"


def term_weights(job: JobRecording, reference: Reference) -> TermWeights:
    """Return the weights of the terms in the reduced gradient of the first step."""
    step = job.steps[0]
    found, own = reference.tensors(step), gradients_of_rank(job, Kind.EXCHANGED, 0, step)
    if TERMS not in found:
        return TermWeights()
    said = msgspec.json.decode(bytes(found[TERMS].tolist()), type=list[tuple[str, str]])
    names, places = tuple(name for name, _ in said), tuple(place for _, place in said)
    scale = reference.replayed.scale
    scale *= job.world if reference.replayed.mode == IN_TURN else 1.0  # passes, not one
    stems = [f"{TERM}{number}/" for number in range(len(names))]
    terms = [
        {n.removeprefix(s): scale * g for n, g in found.items() if n.startswith(s)} for s in stems
    ]
    fitted = fit_exactly(own, *terms)
    if fitted is None:
        silent = [
            n for n, one in zip(names, terms, strict=True) if not any(map(_any, one.values()))
        ]
        return TermWeights(why=f"its term {silent[0]} has no gradient" if silent else "")
    bounds = gradient_tolerances(job, found, step)
    grown = max(1.0, *map(abs, fitted.factors))  # the rounding of a larger term is larger
    noise = grown * math.hypot(*bounds.values())
    errors = [noise * one for one in fitted.moved_by]
    if unknown := [n for n, error in zip(names, errors, strict=True) if not error < _MOST_UNKNOWN]:
        both = " and ".join(unknown[:2])
        return TermWeights(
            why=f"the weights of its terms ({both}) cannot be separated by their gradients"
        )
    if not _explains(own, terms, fitted.factors, {n: grown * b for n, b in bounds.items()}):
        return TermWeights()
    pairs = [*zip(fitted.factors, errors, strict=True)]
    odd = tuple(n for n, (weight, error) in enumerate(pairs) if abs(weight - 1) > error)
    growth = found[GROWTH].tolist()
    sums = [names[n] for n in odd if not math.isclose(growth[n], 1, abs_tol=_GROWTH)]
    named = (job.world, 1 / job.world)
    return TermWeights(
        step, fitted.factors, names, places, odd if len(odd) < len(names) else (),
        f"its term {sums[0]} is not a mean over samples, so its weight relative to the other terms "
        "depends on the number of samples of a rank" if sums else "",
        certain=all(any(abs(pairs[n][0] - by) <= pairs[n][1] for by in named) for n in odd),
    )  # fmt: skip


def _any(one: object) -> bool:
    return bool(one.any())  # type: ignore[attr-defined]


def _explains(
    own: Gradients, terms: Sequence[Gradients], weights: Sequence[float], bounds: dict[str, float]
) -> bool:
    """Return True if every gradient is within its bound of the weighted sum of the terms."""
    for name, gradient in own.items():
        parts = [one.get(name) for one in terms]
        if gradient is None or name not in bounds or any(part is None for part in parts):
            continue
        pairs = zip(weights, parts, strict=True)
        left = gradient.double() - sum(w * part.double() for w, part in pairs if part is not None)
        if not float(left.norm()) <= bounds[name]:
            return False
    return True
