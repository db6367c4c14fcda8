"""Causes of wrong gradients, losses and replicas in a model-parallel layout.

Backward goes from the loss to the inputs, so what is wrong in one layer is passed on to those
before it: a cause is looked for in the last module that has a wrong gradient.
"""

from collections.abc import Iterator
from itertools import combinations
from math import isclose, prod

import msgspec

from distcheck.judge.diagnosis.measurements import (
    SAME_FACTOR,
    LayoutFacts,
    LayoutParameter,
    WrongOutputs,
)
from distcheck.judge.diagnosis.wording import Failures, number_text, where
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.odd_ranks import ranks_in_words

# Chosen: a share of its norm by which sums in bfloat16 are off at most, and mistakes seldom.
_OF_PRECISION = 2.0**-6
_APART = "; ranks that read the same samples have different losses"


def explain(failed: Failures, facts: LayoutFacts) -> list[Diagnosis]:
    checks = {check for check, _ in failed}
    if facts.parameters and facts.loss_is_wrong:
        return [_wrong_output(facts)]
    if facts.outputs is not None:
        return [_wrong_output_alone(facts, facts.outputs)]
    if facts.parameters:
        return list(_of_gradients(facts)) or list(_of_backward(facts))
    if "agreement" in checks and not checks & {"gradients", "parameters", "initial state"}:
        return [_replicas(failed)]
    return []


def _wrong_output(facts: LayoutFacts) -> Diagnosis:
    ratio = facts.loss / facts.expected_loss if facts.expected_loss else 0.0
    times = [f"{text}" for text in _products(facts, ratio)]
    same = f", {number_text(ratio)} times it ({' or '.join(times)})" if times else ""
    return name_cause(
        "wrong-output",
        f"step {facts.step}: the loss is {number_text(facts.loss)}, and the whole batch's "
        f"is {number_text(facts.expected_loss)}{same}: the forward pass is wrong, and gradients "
        f"follow from it{_APART if facts.apart else ''}",
        "ranks-apart" if facts.apart else "forward",
    )


def _wrong_output_alone(facts: LayoutFacts, found: WrongOutputs) -> Diagnosis:
    """The loss does not show it: what is wrong with the outputs is said in its place."""
    gradients = "gradients are not" if facts.parameters else "so are all gradients"
    how = f"they differ from the right ones by {100 * found.distance:.2g} % of their norm"
    if found.reordered:
        how = "they are the right rows, in another order than the samples"
    elif found.factor is not None:
        how = f"they are {number_text(found.factor)} times the right ones"
    elif found.shifted:
        how = "all numbers of a sample are off by the same amount, which this loss does not see"
    return name_cause(
        "wrong-output",
        f"step {facts.step}: the loss is right and {gradients}, but what the model "
        f"returns on rank {found.rank} is not: {how}",
        "loss-is-right",
    )


def _of_gradients(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """One diagnosis a cause, each with its parameters; of the last module that has wrong ones."""
    last = [p for p in facts.parameters if p.module == facts.parameters[-1].module]
    by_cause: dict[Diagnosis, list[str]] = {}
    for parameter in last:
        for found in _causes(facts, parameter):
            by_cause.setdefault(found, []).append(parameter.name)
    earlier = len({p.name for p in facts.parameters}) - len(last)
    several = "parameters of earlier layers are" if earlier > 1 else "parameter before them is"
    follow = f"; {earlier} {several} wrong as well" if earlier else ""
    for found, names in by_cause.items():
        place = f"step {facts.step}, {', '.join(names)}"
        yield msgspec.structs.replace(found, evidence=f"{place}: {found.evidence}{follow}")


def _causes(facts: LayoutFacts, found: LayoutParameter) -> Iterator[Diagnosis]:
    """Those of one parameter; the evidence does not name it yet."""
    if found.absent:
        yield name_cause(
            "missing-gradient", f"there is no gradient on {ranks_in_words(found.absent)}"
        )
    elif found.earlier or found.added:
        what = "that of the step before" if found.earlier else "the sum of this step's and the last"
        yield name_cause(
            "stale-gradient" if found.earlier else "accumulated-gradient",
            f"the gradient is {what}",
            "clear-first",
        )
    elif found.factor is not None:
        yield from _of_factor(facts, found)
    elif found.shard:
        yield name_cause(
            "missing-sync",
            "every rank holds the gradient of its own data coordinate's samples",
            "layout",
        )
    elif found.even:
        yield name_cause(
            "unweighted-tokens" if facts.by_tokens else "unweighted-mean",
            "it is the mean of the data coordinates' gradients, each of which counts alike",
            "layout",
        )
    elif found.shares:
        yield name_cause(
            "missing-reduction",
            f"ranks along the axis {found.shares} hold different parts of the gradient, which add "
            "up to the right one",
            axis=found.shares,
        )
    elif found.lost:
        yield name_cause(
            "lost-micro-batch",
            "the gradient lacks that of micro-batch " + ", ".join(map(str, found.lost)),
            "layout",
        )
    elif found.mixed:
        yield name_cause(
            "wrong-group",
            f"ranks along the axis {found.mixed} hold different pieces of the parameter, and each "
            "holds the mean or the sum of all their pieces' gradients",
            axis=found.mixed,
        )
    elif found.distance < _OF_PRECISION:
        yield name_cause(
            "low-precision",
            f"the gradient is within {100 * found.distance:.2g} % of the right one, and no closer: "
            "something on its way is rounded to a shorter dtype",
            "layout",
        )
    elif found.region is not None:
        factor = found.region.factor
        times = "" if factor is None else f", where it is {number_text(factor)} times the right one"
        where_alone = f"the gradient is wrong in {found.region.where} alone{times}"
        yield name_cause("wrong-shard", where_alone)


def _of_factor(facts: LayoutFacts, of: LayoutParameter) -> list[Diagnosis]:
    """All causes that explain a factor of the right gradient."""
    times = f"the gradient is {number_text(of.factor or 0.0)} times the right one"
    parts, found = facts.micro_batches, list[Diagnosis]()
    if parts > 1 and ((added_up := of.is_scaled_by(parts)) or of.is_scaled_by(1 / parts)):
        how = "their gradients are added up" if added_up else "it is divided by them twice"
        evidence = f"{times}: there are {parts} micro-batches, and {how}"
        found.append(name_cause("pipeline-not-scaled", evidence))
    for axis, size in facts.axes:
        over = f"{times}: the axis {axis} has {size} ranks, over which it was"
        if size < 2 or not (of.is_scaled_by(size) or of.is_scaled_by(1 / size)):
            continue
        if of.is_scaled_by(size):
            evidence = f"{over} added up"
            added = name_cause("missing-division", evidence, "layout", size=size)
            found.append(
                added if axis == "data" else name_cause("extra-reduction", evidence, axis=axis)
            )
        elif axis == "data":
            found.append(name_cause("double-division", f"{over} averaged", "layout", size=size))
        else:
            counted = "tokens" if facts.by_tokens else "usual"
            found.append(name_cause("extra-division", f"{over} averaged", counted, axis=axis))
    return found or [name_cause("wrong-divisor", times, "layout")]


def _products(facts: LayoutFacts, ratio: float) -> Iterator[str]:
    """The axes whose sizes make up a ratio, or its inverse."""
    axes = [(name, size) for name, size in facts.axes if size > 1]
    for count in range(1, len(axes) + 1):
        for chosen in combinations(axes, count):
            size = prod(size for _, size in chosen)
            names = " x ".join(name for name, _ in chosen)
            if _same(ratio, size):
                yield f"the size of {names}"
            elif _same(ratio, 1 / size):
                yield f"1 / the size of {names}"
    if facts.micro_batches > 1 and _same(ratio, facts.micro_batches):
        yield "the number of micro-batches"


def _same(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=SAME_FACTOR)


def _of_backward(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """Layers near the loss are right, and those before them are not, in no simple way."""
    if not facts.right or facts.loss_is_wrong:
        return
    last = facts.parameters[-1]
    yield name_cause(
        "wrong-backward-communication",
        f"step {facts.step}: the loss is right, and so are the gradients of "
        f"{', '.join(facts.right)}; they are wrong from {last.module or last.name} on towards the "
        "inputs",
    )


def _replicas(failed: Failures) -> Diagnosis:
    result = failed["agreement", "-"]
    return name_cause(
        "replicated-gradients-differ",
        "every gradient is within its bound, but ranks that hold the same parameter do not hold "
        f"the same bits of it: {where(result)}",
    )
