"""Causes in which ranks count otherwise than alike: left out, added twice, with another sign."""

from collections.abc import Sequence
from math import isclose

from distcheck.judge.diagnosis.combinations import Reading, usual_factors
from distcheck.judge.diagnosis.facts import StepFacts
from distcheck.judge.diagnosis.findings import Finding, number_text, positions_text

SIGN = (
    "look for a minus sign: a gradient that is subtracted, an update that is sent in place of a "
    "gradient, a loss that is to be maximised"
)

DUPLICATED = (
    "look at the index that picks a rank's buffer: one that is used twice, a ring that goes round "
    "once too often, a gathered list whose entries are one tensor"
)


def signed(step: StepFacts, way: Reading, where: str) -> Finding:
    """Some ranks count -1 times."""
    minus = [rank for rank, count in enumerate(way.counts) if count * way.factor < 0]
    return Finding(
        "wrong-sign",
        f"{where}: the sign is turned in what {positions_text(step, minus)} gave, as every rank "
        f"holds it (all times {number_text(abs(way.factor))})",
        SIGN,
    )


def chain(way: Reading, where: str) -> Finding:
    """Each rank's gradient is averaged with what was there."""
    total = sum(way.counts)
    shown = ", ".join(f"{count}/{total}" for count in way.counts)
    return Finding(
        "chained-mean",
        f"{where}: in what every rank holds the ranks' gradients count {shown}, as where each is "
        "averaged with what came before it, (a + b) / 2 again and again",
        "sum the gradients of all ranks first, and divide once by their number",
    )


def count_less(step: StepFacts, way: Reading, where: str) -> list[Finding]:
    """Most ranks count as they should, and the others a part of that: nothing was added twice."""
    most = max(way.counts)
    fewer = [rank for rank, count in enumerate(way.counts) if count < most]
    if 0 in way.counts or 2 * len(fewer) >= len(way.counts):
        return []
    # Chosen: far above rounding in float32, far below one rank in a thousand.
    if not isclose(way.factor * most, 1.0, rel_tol=1e-4):
        return []
    counts = ", ".join(number_text(count / most) for count in way.counts)
    return [
        Finding(
            "wrong-divisor",
            f"{where}: ranks count {counts} times in what every rank holds; what was given to the "
            f"exchange on {positions_text(step, fewer)} had another scale than on the others",
            "multiply or divide by the same number on every rank; look for a condition on the "
            "rank, and for a group whose size is taken for the world's",
        )
    ]


def not_divided(step: StepFacts, way: Reading, where: str) -> list[Finding]:
    """A second mistake beside the counts: a factor that neither all ranks, nor those that count,
    nor their counts explain.
    """
    world, factor = len(step.shares), way.factor
    *usual, undivided = usual_factors(way.counts, step.shares)
    if factor in usual:
        return []
    evidence = f"{where}: what is counted so is also multiplied by {number_text(factor)}"
    if factor == undivided:
        suggestion = f"divide by the number of ranks ({world}) once, after the sum"
        return [Finding("missing-division", f"{evidence}: the sum is not divided", suggestion)]
    return [
        Finding("wrong-divisor", evidence, "look for a further factor on the loss or the gradients")
    ]


def dropped(step: StepFacts, positions: Sequence[int], *, mean: bool) -> str:
    """What to do about ranks that do not count. `mean` says whether what is left is the right mean
    over the other ranks: a server that has no data by design leaves that.
    """
    ranks = positions_text(step, positions)
    text = (
        f"look for a range over ranks, or a ring, that ends too early, and for what keeps "
        f"{ranks} out of the group"
    )
    others = len(step.shares) - 1
    if len(positions) > 1 or not mean or not step.undeclared or others < 1:
        return text
    return (
        f"{text}; the rest is the mean over the other ranks. If {ranks} is a server that has no "
        f"data by design, give --without-data {step.number(positions[0])}, and a --batch that is "
        f"a multiple of {others}"
    )


def counted(step: StepFacts, way: Reading, where: str) -> Finding:
    """Ranks count a whole number of times: some not at all, or some more than once."""
    counts = ", ".join(map(str, way.counts))
    absent = [rank for rank, count in enumerate(way.counts) if count == 0]
    evidence = (
        f"{where}: ranks count {counts} times in what every rank holds (all times "
        f"{number_text(way.factor)})"
    )
    if max(way.counts) > 1:
        if absent:
            evidence += f", {positions_text(step, absent)} not at all"
        return Finding("duplicated-rank", evidence, DUPLICATED)
    required = len(way.counts) / (len(way.counts) - len(absent)) if absent else 1.0
    # Chosen: far above rounding in float32, far below one rank in a thousand.
    mean = isclose(way.factor, required, rel_tol=1e-4)
    return Finding("dropped-rank", evidence, dropped(step, absent, mean=mean))
