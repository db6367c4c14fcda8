"""Least-squares fits of gradients by name."""

from collections.abc import Mapping

import torch

from distcheck.judge import fitting
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.recording import Kind

Gradients = Mapping[str, torch.Tensor | None]


def fit(actual: Gradients, *bases: Gradients) -> tuple[tuple[float, ...], float] | None:
    """Fit `actual` as a linear combination of `bases`. Return the factors and the relative
    residual; None if a base is zero.
    """
    found = fit_exactly(actual, *bases)
    return (found.factors, found.share) if found is not None and found.size else None


def fit_exactly(actual: Gradients, *bases: Gradients) -> fitting.LeastSquaresFit | None:
    """Return the same fit with the errors of its factors."""
    rows = []
    for name, one in actual.items():
        several = [one, *(base.get(name) for base in bases)]
        there = tuple(part for part in several if part is not None)
        if len(there) == len(several) and len({part.numel() for part in there}) == 1:
            rows.append(there)
    return fitting.fit_least_squares(rows)


def gradients_of_rank(job: JobRecording, kind: Kind, rank: int, step: int) -> Gradients:
    return {name: job.gradient(kind, rank, step, name) for name in job.parameters(step)}
