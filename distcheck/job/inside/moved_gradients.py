"""Recognizes gradients that a script moves to its own buffer after a backward pass.

An engine such as ZeRO-2 sets `.grad` to None after every micro-batch and, at the step, sets it to
the sum over all micro-batches. The recorder drops contributions to a `.grad` that is cleared, but
keeps their sum as `cleared/`. The values decide if a step was trained on them: with them, the
optimizer gradient is a multiple of the ranks' mean; without them, it is a multiple of no mean.
"""

import dataclasses
from typing import Literal

import msgspec
import torch

from distcheck.job.fitting import fit
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import StepRecord
from distcheck.recordings.recording import Kind

_SAME = 1e-3  # Heuristic: rounding leaves 1e-6; a missing micro-batch leaves a tenth or more


def with_moved_gradients(job: JobRecording) -> JobRecording:
    """Return the recording with moved gradients added to the local gradients, and their passes."""
    moved = frozenset(step for step in job.steps if fate_of_cleared(job, step) == "moved")
    if not moved:
        return job
    records = {
        place: _with_all_passes(record) if place[1] in moved else record
        for place, record in job.records.items()
    }
    return dataclasses.replace(job, records=records, moved=moved, _kept=type(job._kept)())


def fate_of_cleared(job: JobRecording, step: int) -> Literal["none", "moved", "lost", "unclear"]:
    """Return what the script did with the gradients that it cleared before a step."""
    if not any(_cleared(record) for record in job.at(step)):
        return "none"
    if not all(record.whole for record in job.at(step)):
        return "unclear"
    without, total = (_residual(job, step, cleared=cleared) for cleared in (False, True))
    return "lost" if without <= _SAME else "moved" if total <= _SAME else "unclear"


def _cleared(record: StepRecord) -> list[str]:
    return [name.partition("/")[2] for name in record.digests if name.startswith("cleared/")]


def _residual(job: JobRecording, step: int, *, cleared: bool) -> float:
    """Return the residual of the optimizer gradients after fitting them by the ranks' mean."""
    given: dict[str, torch.Tensor | None] = {}
    own: dict[str, torch.Tensor | None] = {}
    kinds = ("local", "cleared") if cleared else ("local",)
    for name in job.parameters(step):
        given[name] = job.gradient(Kind.GRADIENT, job.holders(step, name)[0], step, name)
        kept = [
            job.tensors(rank, step).get(f"{k}/{name}") for rank in range(job.world) for k in kinds
        ]
        terms = [one.double() for one in kept if one is not None]
        if terms:
            own[name] = torch.stack(terms).sum(0)
    fitted = fit(given, own)
    return 1.0 if fitted is None else fitted[1]


def _with_all_passes(record: StepRecord) -> StepRecord:
    passes = [msgspec.structs.replace(p, live=p.live or p.loss is not None) for p in record.passes]
    digests = {f"local/{name}": record.digests[f"cleared/{name}"] for name in _cleared(record)}
    return msgspec.structs.replace(
        record, passes=tuple(passes), digests={**digests, **record.digests}
    )
