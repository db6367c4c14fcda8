"""What mistakes leave where ranks count by tokens. Pure arithmetic.

A rank's loss is a mean over n_r tokens of its p_r positions, in s_r samples; T, P and N are what
the ranks have together. What is right is sum_r (n_r / T) g_r, with g_r the gradient of rank r's
mean. These numbers are known exactly, so what a mistake leaves is known as well:

    every rank counts alike, or by its samples      sum_r g_r / W,  sum_r (s_r / N) g_r
    padding counts in the divisor of all            T / P times the right one
    padding counts in each rank's own divisor       sum_r (n_r / p_r) g_r / W
    sums divided by the ranks, or the samples       T / W, T / N times the right one
"""

from collections.abc import Sequence
from math import isclose

from distcheck.judge.diagnosis.facts import StepFacts

# Derived: weights are quotients of whole numbers, off by a few u of float64.
_EXACTLY = 1e-12


def named_factors(step: StepFacts) -> list[float]:
    """The factors of the right gradient that numbers of tokens explain."""
    if not step.tokens:
        return []
    tokens, positions = sum(step.tokens), sum(step.positions)
    padding = [tokens / positions] if 0 < tokens < positions else []
    divisors = [1, len(step.shares), sum(step.samples)] if step.summed else []
    return [*padding, *(tokens / divisor for divisor in divisors)]


def other_weights(step: StepFacts) -> dict[str, list[float]]:
    """Weights that ranks may have had in place of those by tokens, each by the kind of its
    `Reading`; none that is a multiple of another.
    """
    if not step.tokens:
        return {}
    world, samples = len(step.shares), sum(step.samples)
    found = {"by samples": [size / samples for size in step.samples]}
    if step.positions and min(step.positions) > 0:
        pairs = zip(step.tokens, step.positions, strict=True)
        found["by positions"] = [n / p / world for n, p in pairs]
    known = [list(step.shares), [1.0 / world] * world]
    return {
        kind: weights
        for kind, weights in found.items()
        if not any(_is_multiple(weights, other) for other in known)
    }


def _is_multiple(weights: Sequence[float], other: Sequence[float]) -> bool:
    total, others = sum(weights), sum(other)
    pairs = zip(weights, other, strict=True)
    return all(isclose(a * others, b * total, rel_tol=_EXACTLY) for a, b in pairs)
