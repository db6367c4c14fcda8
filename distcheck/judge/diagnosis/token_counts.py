"""Causes that show where ranks count by tokens: weights by something else, divisors with padding.

What the numbers are, and what each mistake leaves, is in `token_weights.py`.
"""

from collections.abc import Sequence
from math import isclose

from distcheck.judge.diagnosis.combinations import Reading
from distcheck.judge.diagnosis.facts import StepFacts
from distcheck.judge.diagnosis.findings import Finding, number_text

# Derived: factors are quotients of whole numbers, off by a few u of float64.
_EXACTLY = 1e-12
_DIVIDE = (
    "divide the sum over all ranks by the tokens of all ranks, which takes an all_reduce of "
    "step.tokens"
)
_WEIGHT = (
    "multiply each rank's mean gradient by its tokens (step.tokens) and divide the sum by those of "
    'all ranks, which takes an all_reduce; with @strategy(loss="tokens") backward starts from the '
    "sum over the rank's tokens, so that only the division is left"
)
_PADDING = (
    "divide by the number of targets that the loss counts, not by batch size times length: leave "
    "out the positions of ignore_index"
)


def unweighted(step: StepFacts, way: Reading, where: str) -> Finding:
    """Each rank's mean counts alike, or by its samples."""
    shares = ", ".join(number_text(share) for share in step.shares)
    how = "by their samples" if way.kind == "by samples" else "equally"
    return Finding(
        "unweighted-tokens",
        f"{where}: the ranks' mean gradients are weighted {how}; they have "
        f"{_listed(step.tokens)} tokens, so the weights should be {shares}",
        _DIVIDE if step.summed else _WEIGHT,
    )


def padded(step: StepFacts, where: str) -> Finding:
    """Each rank's sum is divided by its own positions, and ranks then count alike."""
    factors = [n / p for n, p in zip(step.tokens, step.positions, strict=True)]
    return Finding(
        "padding-counted",
        f"{where}: each rank's gradient is divided by its positions "
        f"({_listed(step.positions)}) and not by its tokens ({_listed(step.tokens)}): "
        f"the ranks' means count "
        f"{', '.join(map(number_text, factors))} times",
        _PADDING,
    )


def of_factor(step: StepFacts, factor: float, evidence: str) -> list[Finding]:
    """What a factor of the right gradient is, where it is one of numbers of tokens."""
    if not step.tokens:
        return []
    tokens, positions, world = sum(step.tokens), sum(step.positions), len(step.shares)
    found = []
    if 0 < tokens < positions and _is(factor, tokens / positions):
        found.append(
            Finding(
                "padding-counted",
                f"{evidence}, which is {tokens:,} tokens over {positions:,} positions: padding "
                "counts in the divisor",
                _PADDING,
            )
        )
    if not step.summed or _is(factor, world) or _is(factor, 1 / world):
        return found
    if _is(factor, tokens):
        said = f"{evidence}, which is the number of tokens of all ranks: nothing was divided"
        return [*found, Finding("missing-division", said, _DIVIDE)]
    divisors = {"ranks": world, "samples": sum(step.samples)}
    for what, number in divisors.items():
        if number != tokens and _is(factor, tokens / number):
            said = (
                f"{evidence}, as if the sum were divided by the number of {what} ({number:,}) and "
                f"not by that of the tokens ({tokens:,})"
            )
            found.append(Finding("wrong-divisor", said, _DIVIDE))
    return found


def _is(factor: float, other: float) -> bool:
    return isclose(factor, other, rel_tol=_EXACTLY)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
