"""Causes of wrong gradients and results of code that exchanges in its forward pass: losses that
gather, and metrics.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import prod

import msgspec

from distcheck.judge.diagnosis.measurements import LayoutFacts, LayoutParameter
from distcheck.judge.diagnosis.wording import Failures, number_text, some_of, where
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.odd_ranks import ranks_in_words


def explain(failed: Failures, facts: LayoutFacts) -> list[Diagnosis]:
    checks = {check for check, _ in failed}
    if facts.form == "metric" and facts.parameters:
        return [_of_result(facts, facts.parameters[0])]
    found = list(_of_gradients(facts)) if facts.parameters else []
    if facts.parameters and facts.loss_is_wrong and not found:
        found = [_wrong_loss(facts)]
    if not found and "buffers" in checks:
        result = next(result for (check, _), result in failed.items() if check == "buffers")
        evidence = f"{where(result)}: this is not what all samples leave in one process"
        found = [name_cause("buffers-differ", evidence, "exchanging")]
    return found


def _world(facts: LayoutFacts) -> int:
    return prod(size for _, size in facts.axes)


def _of_gradients(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """One a cause, each with its parameters."""
    wrong, place = facts.parameters, f"step {facts.step}"
    if all(found.unexchanged for found in wrong):
        also = ", and so is the loss" if facts.loss_is_wrong else ""
        yield name_cause(
            "missing-sync",
            f"{place}: the gradient is the mean of what each rank has of its own samples{also}",
            "loss",
        )
        return
    by_cause: dict[Diagnosis, list[LayoutParameter]] = defaultdict(list)
    for found in wrong:
        if (one := _of_factor(facts, found)) is not None:
            by_cause[one].append(found)
    for one, found_in in by_cause.items():
        names = some_of([found.name for found in found_in])
        yield msgspec.structs.replace(one, evidence=f"{place}, {names}: {one.evidence}")
    if by_cause or facts.loss_is_wrong:
        return
    names = some_of([found.name for found in wrong])
    most = max(found.distance for found in wrong)
    others = len(facts.right) and f", and those of {', '.join(facts.right)} are right"
    yield name_cause(
        "wrong-backward-communication",
        f"{place}, {names}: the loss is that of one process, and the gradient is not: it is off by "
        f"{100 * most:.2g} % of its norm{others or ''}",
        "loss",
    )


def _of_factor(facts: LayoutFacts, found: LayoutParameter) -> Diagnosis | None:
    if found.absent:
        evidence = f"there is no gradient on {ranks_in_words(found.absent)}"
        return name_cause("missing-gradient", evidence)
    if found.factor is None:
        return None
    times = f"the gradient is {number_text(found.factor)} times that of one process"
    world = _world(facts)
    if found.is_scaled_by(world):
        return name_cause("missing-division", f"{times}, the number of ranks", "loss")
    if found.is_scaled_by(1 / world):
        return name_cause("double-division", f"{times}, 1 / the number of ranks", "loss")
    return name_cause("wrong-divisor", times, "layout")


def _wrong_loss(facts: LayoutFacts) -> Diagnosis:
    got, right = facts.loss, facts.expected_loss
    ratio = f", {number_text(got / right)} times it" if right else ""
    return name_cause(
        "wrong-output",
        f"step {facts.step}: the loss over the ranks is {number_text(got)}, and that of one "
        f"process {number_text(right)}{ratio}",
        "loss",
    )


def _of_result(facts: LayoutFacts, found: LayoutParameter) -> Diagnosis:
    place, world = f"step {facts.step}: compute()", _world(facts)
    if found.unexchanged:
        evidence = f"{place} gives each rank the result of its own samples"
        return name_cause("missing-sync", evidence, "metric")
    if found.even:
        evidence = f"{place} gives the mean of the ranks' results, each of which counts alike"
        return name_cause("unweighted-mean", evidence, "metric")
    if len(found.wrong) < world:
        evidence = f"{place} gives another result on {ranks_in_words(found.wrong)} alone"
        return name_cause("wrong-output", evidence, "metric")
    if found.factor is not None:
        times = f"{place} gives {number_text(found.factor)} times the result of one process"
        if found.is_scaled_by(world):
            return name_cause("missing-division", times, "metric")
        if found.is_scaled_by(1 / world):
            return name_cause("double-division", times, "metric")
        return name_cause("wrong-divisor", times, "metric")
    where_wrong = f" in {found.region.where}" if found.region is not None else ""
    evidence = (
        f"{place} gives another result than one process{where_wrong}: it is off by "
        f"{100 * found.distance:.2g} % of its norm"
    )
    return name_cause("wrong-output", evidence, "metric")
