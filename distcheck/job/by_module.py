"""Compares the modules of a job with those of its reference. If a failed job did not record
modules, reruns it.
"""

import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from distcheck import private
from distcheck.errors import DistcheckError, UsageError
from distcheck.job import replaying, running
from distcheck.job.copying import ProjectCopy
from distcheck.job.options import JobOptions
from distcheck.job.perturbed_runs import record_again
from distcheck.job.replaying import NoReferenceError, Reference
from distcheck.job.settings import JobSettings
from distcheck.judge.divergence.job_recordings import unit_roundoff_of_step
from distcheck.judge.divergence.modules import (
    OF_REFERENCE,
    StepInBothRuns,
    add_module_evidence,
    first_wrong,
)
from distcheck.judge.divergence.noise_floor import why_choice_differs
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.watched import WatchedStep, prefix_of_rank, unpack_modules
from distcheck.records import CaseReport
from distcheck.records.layers import IN_FLOAT32
from distcheck.records.run_facts import ModuleComparison

# Only failures of these checks that have no explanation are worth a rerun.
_ABOUT = ("gradients", "clipped gradients", "loss")


def by_module(case: CaseReport, job: JobRecording, reference: Reference) -> ModuleComparison | None:
    """Return the first module whose inputs match the reference and whose outputs do not; None if
    modules were not recorded.
    """
    about = (*_ABOUT, "agreement")
    wrong = (one.first for one in case.checks if one.verdict == "fail" and one.check in about)
    last = min((place.step for place in wrong if place is not None), default=math.inf)
    return first_wrong(_steps(job, reference, last), OF_REFERENCE)


def _steps(
    job: JobRecording, reference: Reference, last: float
) -> Iterator[tuple[int, int, StepInBothRuns]]:
    shares: dict[tuple[str, bool], float] = {}  # largest relative change under perturbation
    for step in (seen.step for seen in reference.replayed.steps if seen.step <= last):
        found = reference.tensors(step)
        for rank in range(job.world):
            own, other = job.modules(rank, step), _reference_modules(reference, step, rank)
            if own is None or other is None:
                continue
            moved = _pair_with_spread(other, found.get(f"{prefix_of_rank(rank)}spread"), shares)
            unit = unit_roundoff_of_step([job.records[rank, step]])
            yield step, rank, StepInBothRuns(own, other, moved, unit, fits=True)


def _reference_modules(reference: Reference, step: int, rank: int) -> WatchedStep | None:
    try:
        return unpack_modules(reference.tensors(step), prefix_of_rank(rank))
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{reference.folder} is damaged: {error}; run distcheck job again"
        ) from error


class _Moved:
    """How far the tensors of a step change when parameters are perturbed by one ULP.

    For a step without a measurement, the largest relative change at an earlier step is used.
    """

    def __init__(
        self, seen: WatchedStep, spread: torch.Tensor, shares: dict[tuple[str, bool], float]
    ):
        self._norms: dict[tuple[str, bool], float] = {}
        self._shares = shares
        for name, place in seen.places().items():
            for kind, norm in enumerate(seen.sums[place].norm(dim=-1).tolist()):
                key, measured = (name, bool(kind)), float(spread[place, kind])
                self._norms[key] = norm
                if norm and math.isfinite(measured):
                    shares[key] = max(shares.get(key, 0.0), measured / norm)

    def __call__(self, name: str, gradient: bool) -> float | None:
        key = (name, gradient)
        norm = self._norms.get(key)
        if norm is None or key not in self._shares:
            return None if norm != 0 else 0.0
        return self._shares[key] * norm


def _pair_with_spread(
    seen: WatchedStep, spread: torch.Tensor | None, shares: dict[tuple[str, bool], float]
) -> _Moved:
    if spread is None or spread.shape != seen.sums.shape[:2]:
        spread = torch.full(seen.sums.shape[:2], math.nan)
    return _Moved(seen, spread, shares)


def with_module_evidence(case: CaseReport, modules: ModuleComparison | None) -> CaseReport:
    """Return the case with the first wrong module as evidence, or as the only cause."""
    if modules is None:
        return case
    if case.verdict == "pass" and modules.is_found:
        said = f"the gradients passed to the optimizer are right nevertheless; {modules.first}"
        modules = msgspec.structs.replace(modules, first=said)
    causes = add_module_evidence(case.diagnosis, modules)
    return msgspec.structs.replace(case, diagnosis=tuple(causes), modules=modules)


def needs_diagnosis(case: CaseReport) -> bool:
    """Return True if modules may explain a failed gradient or loss check that has no cause."""
    failed = {one.check for one in case.checks if (one.verdict, one.layer) == ("fail", IN_FLOAT32)}
    unexplained = any(one.cause == "unexplained" for one in case.diagnosis)
    return case.modules is None and unexplained and bool(failed.intersection(_ABOUT))


def diagnose_modules(
    case: CaseReport, job: JobRecording, asked: JobOptions, settings: JobSettings,
    copy: ProjectCopy, folder: Path,
) -> CaseReport:  # fmt: skip
    """Rerun the command and the reference in a copy of the project with modules recorded, and
    return the case with the result. If the rerun trained differently, a note gives the reason.
    """
    try:
        found = _rerun_with_modules(job, asked, settings, copy, folder)
        private.folder(folder / "reference", is_new=True)
        replayed = replaying.replay(
            found, ProjectCopy(folder / "copy", copy.folder), folder / "reference",
            on_cpu=asked.on_cpu, weights=asked.weights, command=asked.reference or "",
            deadline_s=asked.deadline_s, modules=True,
        )  # fmt: skip
        modules = by_module(case, found, replayed)
        note = "the command ran again in a copy of its folder to record its modules"
    except (OSError, shutil.Error, DistcheckError, NoReferenceError) as error:
        modules, note = None, f"its modules could not be recorded in a second run: {error}"
    looked = with_module_evidence(case, modules)
    return msgspec.structs.replace(looked, notes=(*case.notes, note))


def _rerun_with_modules(
    job: JobRecording, asked: JobOptions, settings: JobSettings, copy: ProjectCopy, folder: Path
) -> JobRecording:
    found = reading.read_recording(
        record_again(
            msgspec.structs.replace(settings, modules=True, kept=False, ops=False),
            running.command_of(asked.words, asked.nproc), copy, folder, deadline_s=asked.deadline_s,
        )
    )  # fmt: skip
    found = dataclasses.replace(found, steps=found.steps[: len(job.steps)])
    places = range(len(job.steps))
    if why := next(filter(None, (why_choice_differs(job, found, place) for place in places)), ""):
        raise DistcheckError(why)
    return found
