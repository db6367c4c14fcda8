"""Causes between the passes of a step: gradients that were cleared, kept or clipped there."""

from collections.abc import Iterator

from distcheck.job.reading import Recording
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause


def between_passes(job: Recording, step: int) -> Iterator[Diagnosis]:
    """Why gradients are not what the passes of this step have added up to, where that shows."""
    record = job.records[0, step]
    passes = [one for one in record.passes if one.loss is not None]
    dropped = [number for number, one in enumerate(passes) if not one.live]
    early = [clip.passes for clip in record.clips if 0 < clip.passes < len(record.passes)]
    if dropped:
        yield name_cause(
            "lost-micro-batch",
            f"step {step}: of {len(passes)} backward passes number {dropped[-1]} (from 0) "
            "is in no gradient that the optimizer got",
            "job",
        )
    elif record.carried:
        yield name_cause(
            "accumulated-gradient",
            f"step {step}: the gradients of the last step are still in those that it got",
            "job",
        )
    elif early:
        yield name_cause(
            "clip-in-accumulation",
            f"step {step}: gradients were clipped after {early[0]} of "
            f"{len(record.passes)} backward passes, and added to afterwards",
        )
