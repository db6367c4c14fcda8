"""Sets of gradients as multiples of others, by least squares: the one fit behind every factor."""

from collections.abc import Mapping, Sequence

import torch

from distcheck.job.reading import Recording

Gradients = Mapping[str, torch.Tensor | None]


def fit(actual: Gradients, *bases: Gradients) -> tuple[list[float], float] | None:
    """The factors whose multiples of `bases` add up to `actual`, and the share of its norm that
    they leave; None where one of them is zero.
    """
    columns: list[list[torch.Tensor]] = []
    for name, one in actual.items():
        several = [one, *(base.get(name) for base in bases)]
        there = [part.double().reshape(-1) for part in several if part is not None]
        if len(there) == len(several) and len({part.shape for part in there}) == 1:
            columns.append(there)
    if not columns:
        return None
    gram = torch.zeros(len(bases) + 1, len(bases) + 1, dtype=torch.float64)
    for parts in columns:
        stacked = torch.stack(parts)
        gram += stacked @ stacked.T
    if not bool((gram.diagonal() > 0).all()):
        return None
    found = torch.linalg.lstsq(gram[1:, 1:], gram[1:, :1]).solution[:, 0]
    left = 0.0
    for own, *others in columns:
        apart = own - sum(float(by) * other for by, other in zip(found, others, strict=True))
        left += float(apart.square().sum())
    return found.tolist(), (left / float(gram[0, 0])) ** 0.5


def of_rank(job: Recording, kind: str, rank: int, step: int) -> Gradients:
    """What a rank held of every parameter at a step."""
    return {name: job.gradient(kind, rank, step, name) for name in job.parameters(step)}


def mean(parts: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    """The weighted mean of what the ranks held; of those that have nothing, zero."""
    found: dict[str, torch.Tensor] = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, one in part.items():
            if one is not None:
                found[name] = found.get(name, torch.zeros(())) + one.double() * weight
    return found
