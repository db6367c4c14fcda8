"""Least-squares fits and means of gradients by name."""

from collections.abc import Mapping, Sequence

import torch

from distcheck.judge import fitting
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.recording import Kind

Gradients = Mapping[str, torch.Tensor | None]


def fit(actual: Gradients, *bases: Gradients) -> tuple[tuple[float, ...], float] | None:
    """Fit `actual` as a linear combination of `bases`; return the factors and the relative
    residual, or None if a base is zero.
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
    """Return the weighted mean of the ranks' gradients; missing ones are zero."""
    found: dict[str, torch.Tensor] = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, one in part.items():
            if one is not None:
                found[name] = found.get(name, torch.zeros(())) + one.double() * weight
    return found
