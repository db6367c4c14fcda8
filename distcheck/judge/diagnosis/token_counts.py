"""Causes that show where ranks count by tokens: weights by something else, divisors with padding.

What the numbers are, and what each mistake leaves, is in `token_weights.py`.
"""

from collections.abc import Sequence
from math import isclose

from distcheck.judge.diagnosis.combinations import Reading
from distcheck.judge.diagnosis.facts import StepFacts
from distcheck.judge.diagnosis.wording import number_text
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause

# Derived: factors are quotients of whole numbers, off by a few u of float64.
_EXACTLY = 1e-12


def unweighted(step: StepFacts, way: Reading, where: str) -> Diagnosis:
    """Each rank's mean counts alike, or by its samples."""
    shares = ", ".join(number_text(share) for share in step.shares)
    how = "by their samples" if way.kind == "by samples" else "equally"
    return name_cause(
        "unweighted-tokens",
        f"{where}: the ranks' mean gradients are weighted {how}; they have "
        f"{_listed(step.tokens)} tokens, so the weights should be {shares}",
        "tokens-of-all" if step.summed else "usual",
    )


def padded(step: StepFacts, where: str) -> Diagnosis:
    """Each rank's sum is divided by its own positions, and ranks then count alike."""
    factors = [n / p for n, p in zip(step.tokens, step.positions, strict=True)]
    return name_cause(
        "padding-counted",
        f"{where}: each rank's gradient is divided by its positions "
        f"({_listed(step.positions)}) and not by its tokens ({_listed(step.tokens)}): "
        f"the ranks' means count "
        f"{', '.join(map(number_text, factors))} times",
    )


def of_factor(step: StepFacts, factor: float, evidence: str) -> list[Diagnosis]:
    """What a factor of the right gradient is, where it is one of numbers of tokens."""
    if not step.tokens:
        return []
    tokens, positions, world = sum(step.tokens), sum(step.positions), len(step.shares)
    found = []
    if 0 < tokens < positions and _is(factor, tokens / positions):
        found.append(
            name_cause(
                "padding-counted",
                f"{evidence}, which is {tokens:,} tokens over {positions:,} positions: padding "
                "counts in the divisor",
            )
        )
    if not step.summed or _is(factor, world) or _is(factor, 1 / world):
        return found
    if _is(factor, tokens):
        said = f"{evidence}, which is the number of tokens of all ranks: nothing was divided"
        return [*found, name_cause("missing-division", said, "tokens-of-all")]
    divisors = {"ranks": world, "samples": sum(step.samples)}
    for what, number in divisors.items():
        if number != tokens and _is(factor, tokens / number):
            said = (
                f"{evidence}, as if the sum were divided by the number of {what} ({number:,}) and "
                f"not by that of the tokens ({tokens:,})"
            )
            found.append(name_cause("wrong-divisor", said, "tokens-of-all"))
    return found


def _is(factor: float, other: float) -> bool:
    return isclose(factor, other, rel_tol=_EXACTLY)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
