"""Causes between the passes of a step: gradients that were cleared, kept or clipped there."""

from collections.abc import Iterator

from distcheck.job.reading import Recording
from distcheck.records import Diagnosis


def between_passes(job: Recording, step: int) -> Iterator[Diagnosis]:
    """Why gradients are not what the passes of this step have added up to, where that shows."""
    record = job.records[0, step]
    passes = [one for one in record.passes if one.loss is not None]
    dropped = [number for number, one in enumerate(passes) if not one.live]
    early = [clip.passes for clip in record.clips if 0 < clip.passes < len(record.passes)]
    if dropped:
        yield Diagnosis(
            cause="lost-micro-batch",
            evidence=f"step {step}: of {len(passes)} backward passes number {dropped[-1]} (from 0) "
            "is in no gradient that the optimizer got",
            suggestion="call zero_grad() after the step, or before the first pass of the next one",
        )
    elif record.carried:
        yield Diagnosis(
            cause="accumulated-gradient",
            evidence=f"step {step}: the gradients of the last step are still in those that it got",
            suggestion="call zero_grad() after every step",
        )
    elif early:
        yield Diagnosis(
            cause="clip-in-accumulation",
            evidence=f"step {step}: gradients were clipped after {early[0]} of "
            f"{len(record.passes)} backward passes, and added to afterwards",
            suggestion="clip once, after the last pass of the step",
        )
