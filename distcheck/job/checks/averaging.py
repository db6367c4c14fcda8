"""Detects local SGD and outer optimizers: ranks step with local gradients, and average parameters
later.

This algorithm is not equivalent to averaging gradients, so its steps are not compared with a single
process. The recording shows that parameters become the mean over ranks, but not that this is
intended.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch

from distcheck.job.fitting import fit
from distcheck.judge.checks.comparison import compare_within
from distcheck.judge.checks.tally import Tally
from distcheck.machine.numerics import gamma, unit_roundoff
from distcheck.recordings.jobs import sketches
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import CheckResult, Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.layers import ROUNDING

CHECK = "averaging"
_NOT_JUDGED = (
    "and hold the same parameters again {when} (local SGD). This algorithm is not equivalent to "
    "averaging gradients, so it is not judged; judge the synchronization with distcheck verify"
)
# Heuristic: only projections of other ranks' parameters are known, so cancellation is not.
_ROOM = 16
_SHARE = 0.1  # as for gradients: the residual is at most a tenth of the change


def averaging(job: JobRecording) -> CheckResult | None:
    """Return the check of parameter averaging; None if ranks do not average.

    Ranks that diverge in a step must agree again before a later step. If they then hold the
    parameters of one rank, the steps of the other ranks were lost, which is not averaging.
    """
    tally = Tally(CHECK, ROUNDING)
    joined: list[int] = []  # steps before which ranks agree again
    for step, later in pairwise(job.steps):
        apart = [name for name in job.parameters(step) if _diverged(job, step, name)]
        alike = {name: _digests(job, later, f"before/{name}") for name in apart}
        copied = [n for n, own in alike.items() if own <= _digests(job, step, f"after/{n}")]
        if not apart or copied or any(len(own) > 1 for own in alike.values()):
            continue
        joined.append(later)
        sums = _sums(job, step, later, apart)
        compared = {
            name: compare_within(own, mean, bound) for name, (own, mean, bound) in sums.items()
        }
        factor, left = _factor(sums)
        # Neither the mean nor a multiple: an outer optimizer computes something else.
        if all(one.ok for one in compared.values()) or left <= _SHARE * abs(factor - 1):
            for name, one in compared.items():
                tally.add(one, parameter=name, rank=0, step=later)
    if not joined:
        return None
    said = _NOT_JUDGED.format(when=_describe_period(joined))
    tally.missing(f"ranks step by their local gradients {said}")
    return tally.result()


def _describe_period(joined: list[int]) -> str:
    """Describe the steps before which ranks average, by their period if it is constant."""
    between = {later - one for one, later in pairwise(joined)}
    if len(between) != 1:
        return f"before step {joined[0]}"
    (each,) = between
    return "before each step" if each == 1 else f"every {each} steps"


def explain(job: JobRecording, result: CheckResult) -> Diagnosis:
    """Name the cause if parameters after averaging are a multiple of the mean over ranks."""
    later = result.first.step if result.first is not None else job.steps[0]
    step = max(one for one in job.steps if one < later)
    factor, _ = _factor(_sums(job, step, later, job.parameters(step)))
    evidence = f"before step {later} parameters are {factor:.6g}x the mean over the ranks"
    return name_cause("wrong-divisor", evidence, "job")


Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # parameters before the step, mean, bound


def _diverged(job: JobRecording, step: int, name: str) -> bool:
    """Return True if every rank updated the parameter, with different gradients and results."""
    given, after = (_digests(job, step, f"{kind}/{name}") for kind in ("step", "after"))
    return len(job.holders(step, name)) == job.world and len(given) > 1 and len(after) > 1


def _sums(job: JobRecording, step: int, later: int, names: Iterable[str]) -> dict[str, Sums]:
    """Return the projections for the parameters that rank 0 recorded (within the budget)."""
    found = {}
    for name in names:
        own = job.tensors(0, later).get(f"before/{name}")
        before = job.tensors(0, step).get(f"after/{name}")
        parts = [job.sums(rank, step, f"after/{name}") for rank in range(job.world)]
        there = [part for part in parts if part is not None]
        if own is None or before is None or len(there) < job.world:
            continue
        # Derived: W summands are added and divided, each element rounded in its dtype.
        size = sketches.project_magnitudes(own) + sketches.project_magnitudes(before)
        bound = _ROOM * gamma(job.world + 1, unit_roundoff(own.dtype)) * size
        found[name] = sketches.project(own), torch.stack(there).mean(0), bound
    return found


def _factor(sums: dict[str, Sums]) -> tuple[float, float]:
    """Return the fitted factor of the mean, and the relative residual."""
    own, means = ({n: one[place] for n, one in sums.items()} for place in (0, 1))
    fitted = fit(own, means)
    return (1.0, 1.0) if fitted is None else (fitted[0][0], fitted[1])


def _digests(job: JobRecording, step: int, name: str) -> set[str | None]:
    return {record.digests.get(name) for record in job.at(step)}
