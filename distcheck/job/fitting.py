"""Sets of gradients by name, as multiples of others and as means."""

from collections.abc import Mapping, Sequence

import torch

from distcheck.judge import fitting
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.recording import Kind

Gradients = Mapping[str, torch.Tensor | None]


def fit(actual: Gradients, *bases: Gradients) -> tuple[tuple[float, ...], float] | None:
    """The factors whose multiples of `bases` add up to `actual`, and the share of its norm that
    they leave; None where one of them is zero.
    """
    rows = []
    for name, one in actual.items():
        several = [one, *(base.get(name) for base in bases)]
        there = tuple(part for part in several if part is not None)
        if len(there) == len(several) and len({part.numel() for part in there}) == 1:
            rows.append(there)
    found = fitting.fit(rows)
    return (found.factors, found.share) if found is not None and found.size else None


def of_rank(job: JobRecording, kind: Kind, rank: int, step: int) -> Gradients:
    return {name: job.gradient(kind, rank, step, name) for name in job.parameters(step)}


def mean(parts: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    """The weighted mean of what the ranks held; of those that have nothing, zero."""
    found: dict[str, torch.Tensor] = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, one in part.items():
            if one is not None:
                found[name] = found.get(name, torch.zeros(())) + one.double() * weight
    return found
