"""Causes in which ranks count otherwise than alike: left out, added twice, with another sign."""

from collections.abc import Sequence
from math import isclose

from distcheck.judge.diagnosis.combinations import Reading, usual_factors
from distcheck.judge.diagnosis.facts import StepFacts
from distcheck.judge.diagnosis.wording import number_text, positions_text
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause


def signed(step: StepFacts, way: Reading, where: str) -> Diagnosis:
    """Some ranks count -1 times."""
    minus = [rank for rank, count in enumerate(way.counts) if count * way.factor < 0]
    return name_cause(
        "wrong-sign",
        f"{where}: the sign is turned in what {positions_text(step, minus)} gave, as every rank "
        f"holds it (all times {number_text(abs(way.factor))})",
    )


def chain(way: Reading, where: str) -> Diagnosis:
    """Each rank's gradient is averaged with what was there."""
    total = sum(way.counts)
    shown = ", ".join(f"{count}/{total}" for count in way.counts)
    return name_cause(
        "chained-mean",
        f"{where}: in what every rank holds the ranks' gradients count {shown}, as where each is "
        "averaged with what came before it, (a + b) / 2 again and again",
    )


def count_less(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
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
        name_cause(
            "wrong-divisor",
            f"{where}: ranks count {counts} times in what every rank holds; what was given to the "
            f"exchange on {positions_text(step, fewer)} had another scale than on the others",
            "some-ranks",
        )
    ]


def not_divided(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
    """A second mistake beside the counts: a factor that neither all ranks, nor those that count,
    nor their counts explain.
    """
    world, factor = len(step.shares), way.factor
    *usual, undivided = usual_factors(way.counts, step.shares)
    if factor in usual:
        return []
    evidence = f"{where}: what is counted so is also multiplied by {number_text(factor)}"
    if factor == undivided:
        evidence += ": the sum is not divided"
        return [name_cause("missing-division", evidence, "once", world=world)]
    return [name_cause("wrong-divisor", evidence, "further")]


def dropped(step: StepFacts, positions: Sequence[int], evidence: str, *, mean: bool) -> Diagnosis:
    """Ranks that do not count. `mean` says whether what is left is the right mean over the other
    ranks: a server that has no data by design leaves that.
    """
    others = len(step.shares) - 1
    may_serve = len(positions) == 1 and mean and step.undeclared and others > 0
    return name_cause(
        "dropped-rank",
        evidence,
        "usual",
        *["server"] * may_serve,
        ranks=positions_text(step, positions),
        number=step.number(positions[0]) if may_serve else "",
        others=others,
    )


def counted(step: StepFacts, way: Reading, where: str) -> Diagnosis:
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
        return name_cause("duplicated-rank", evidence)
    required = len(way.counts) / (len(way.counts) - len(absent)) if absent else 1.0
    # Chosen: far above rounding in float32, far below one rank in a thousand.
    mean = isclose(way.factor, required, rel_tol=1e-4)
    return dropped(step, absent, evidence, mean=mean)
