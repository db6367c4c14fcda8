"""Causes for ranks weighted by tokens: wrong weights, and divisors that include padding. Pure
arithmetic.

A rank's loss is a mean over n_r tokens of its p_r positions, in s_r samples; T, P and N are the
totals over ranks. The right result is sum_r (n_r / T) g_r, with g_r the gradient of rank r's mean.
These numbers are known exactly, and so is the result of each mistake:

    ranks weighted equally, or by samples        sum_r g_r / W,  sum_r (s_r / N) g_r
    padding included in the common divisor       T / P times the right one
    padding included in each rank's divisor      sum_r (n_r / p_r) g_r / W
    sums divided by the ranks, or the samples    T / W, T / N times the right one
"""

from collections.abc import Sequence
from math import isclose

from distcheck.judge.diagnosis.measurements import StepFacts
from distcheck.judge.diagnosis.wording import number_text
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause

# Derived: weights and factors are quotients of integers, off by a few u of float64.
_EXACTLY = 1e-12


def token_factors(step: StepFacts) -> list[float]:
    """Return the factors of the right gradient that follow from numbers of tokens."""
    if not step.tokens:
        return []
    tokens, positions = sum(step.tokens), sum(step.positions)
    padding = [tokens / positions] if 0 < tokens < positions else []
    divisors = [1, len(step.shares), sum(step.samples)] if step.summed else []
    return [*padding, *(tokens / divisor for divisor in divisors)]


def mistaken_weights(step: StepFacts) -> dict[str, list[float]]:
    """Return possible wrong weights in place of tokens, by the kind of `Reading`. None is a
    multiple of the right weights or of each other.
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


def cause_of_wrong_token_weights(step: StepFacts, kind: str, where: str) -> Diagnosis:
    """Name means of ranks that are weighted equally, or by samples, instead of by tokens."""
    shares = ", ".join(number_text(share) for share in step.shares)
    how = "by their samples" if kind == "by samples" else "equally"
    return name_cause(
        "unweighted-tokens",
        f"{where}: the ranks' mean gradients are weighted {how}; they have "
        f"{_number_list(step.tokens)} tokens, so the weights should be {shares}",
        "tokens-of-all" if step.summed else "usual",
    )


def cause_of_counted_padding(step: StepFacts, where: str) -> Diagnosis:
    """Name sums that are divided by each rank's positions and weighted equally."""
    factors = [n / p for n, p in zip(step.tokens, step.positions, strict=True)]
    return name_cause(
        "padding-counted",
        f"{where}: each rank's gradient is divided by its positions "
        f"({_number_list(step.positions)}) and not by its tokens ({_number_list(step.tokens)}): "
        f"the ranks' means have weights {', '.join(map(number_text, factors))}",
    )


def causes_of_token_factor(step: StepFacts, factor: float, evidence: str) -> list[Diagnosis]:
    """Name a factor of the right gradient that follows from numbers of tokens."""
    if not step.tokens:
        return []
    tokens, positions, world = sum(step.tokens), sum(step.positions), len(step.shares)
    found = []
    if 0 < tokens < positions and _is_close(factor, tokens / positions):
        found.append(
            name_cause(
                "padding-counted",
                f"{evidence}, which is {tokens:,} tokens over {positions:,} positions: padding "
                "is included in the divisor",
            )
        )
    if not step.summed or _is_close(factor, world) or _is_close(factor, 1 / world):
        return found
    if _is_close(factor, tokens):
        text = f"{evidence}, the number of tokens of all ranks: the sum was not divided"
        return [*found, name_cause("missing-division", text, "tokens-of-all")]
    divisors = {"ranks": world, "samples": sum(step.samples)}
    for what, number in divisors.items():
        if number != tokens and _is_close(factor, tokens / number):
            text = (
                f"{evidence}, as if the sum were divided by the number of {what} ({number:,}) "
                f"and not by the number of tokens ({tokens:,})"
            )
            found.append(name_cause("wrong-divisor", text, "tokens-of-all"))
    return found


def _is_close(factor: float, other: float) -> bool:
    return isclose(factor, other, rel_tol=_EXACTLY)


def _number_list(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
