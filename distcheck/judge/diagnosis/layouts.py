"""Causes in model-parallel layouts (wrong gradients, losses and replicas), and in code that
communicates in forward by gathering losses and metrics (wrong gradients and results).

Backward goes from the loss to the inputs, so an error in one layer propagates to earlier layers.
The cause is therefore searched in the last module with a wrong gradient.
"""

from collections import defaultdict
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
from distcheck.judge.diagnosis.wording import (
    Failures,
    first_names_text,
    number_text,
    place_of_divergence,
)
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.odd_ranks import ranks_in_words

# Heuristic: relative error of sums in bfloat16 at most; mistakes are seldom smaller.
_OF_PRECISION = 2.0**-6
_APART = "; ranks that read the same samples have different losses"


def explain(failed: Failures, facts: LayoutFacts) -> list[Diagnosis]:
    checks = {check for check, _ in failed}
    if facts.form:
        return _communication_causes(failed, facts)
    if facts.parameters and facts.loss_is_wrong:
        return [_wrong_output(facts)]
    if facts.outputs is not None:
        return [_wrong_output_cause(facts, facts.outputs)]
    if facts.parameters:
        return list(_gradient_causes(facts)) or list(_backward_cause(facts))
    if "agreement" in checks and not checks & {"gradients", "parameters", "initial state"}:
        return [_replicas(failed)]
    return []


def _wrong_output(facts: LayoutFacts) -> Diagnosis:
    ratio = facts.loss / facts.expected_loss if facts.expected_loss else 0.0
    times = [f"{text}" for text in _products(facts, ratio)]
    same = f", {number_text(ratio)}x that ({' or '.join(times)})" if times else ""
    return name_cause(
        "wrong-output",
        f"step {facts.step}: the loss is {number_text(facts.loss)}, but "
        f"{number_text(facts.expected_loss)} for the global batch{same}: the forward pass is "
        f"wrong, and wrong gradients follow{_APART if facts.apart else ''}",
        "ranks-apart" if facts.apart else "forward",
    )


def _wrong_output_cause(facts: LayoutFacts, found: WrongOutputs) -> Diagnosis:
    """Name wrong outputs that do not affect the loss, with a description."""
    gradients = "gradients are not" if facts.parameters else "so are all gradients"
    how = f"the error is {100 * found.distance:.2g}% of their norm"
    if found.reordered:
        how = "the rows are right, but in a different order than the samples"
    elif found.factor is not None:
        how = f"they are {number_text(found.factor)}x the right outputs"
    elif found.shifted:
        how = (
            "all outputs of a sample are shifted by the same amount, to which this loss is "
            "invariant"
        )
    return name_cause(
        "wrong-output",
        f"step {facts.step}: the loss is right and {gradients}, but the model outputs on rank "
        f"{found.rank} are wrong: {how}",
        "loss-is-right",
    )


def _gradient_causes(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """Yield one diagnosis per cause, for the last module with wrong gradients."""
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
    """Yield the causes of one parameter; the evidence does not name it yet."""
    if found.absent:
        yield name_cause(
            "missing-gradient", f"there is no gradient on {ranks_in_words(found.absent)}"
        )
    elif found.earlier or found.added:
        what = (
            "that of the previous step"
            if found.earlier
            else ("the sum of this and the previous step's gradients")
        )
        yield name_cause(
            "stale-gradient" if found.earlier else "accumulated-gradient",
            f"the gradient is {what}",
            "clear-first",
        )
    elif found.factor is not None:
        yield from _factor_causes(facts, found)
    elif found.shard:
        yield name_cause(
            "missing-sync",
            "every rank holds the gradient of the samples of its own data coordinate",
            "layout",
        )
    elif found.even:
        yield name_cause(
            "unweighted-tokens" if facts.by_tokens else "unweighted-mean",
            "it is the mean over the data coordinates, weighted equally",
            "layout",
        )
    elif found.shares:
        yield name_cause(
            "missing-reduction",
            f"ranks along the axis {found.shares} hold different partial gradients, whose sum is "
            "right",
            axis=found.shares,
        )
    elif found.lost:
        yield name_cause(
            "lost-micro-batch",
            "the gradient does not include micro-batch " + ", ".join(map(str, found.lost)),
            "layout",
        )
    elif found.mixed:
        yield name_cause(
            "wrong-group",
            f"ranks along the axis {found.mixed} hold different shards of the parameter, but "
            "each holds the mean or the sum of the gradients of all shards",
            axis=found.mixed,
        )
    elif found.distance < _OF_PRECISION:
        yield name_cause(
            "low-precision",
            f"the gradient is within {100 * found.distance:.2g}% of the right gradient, but no "
            "closer: an intermediate result is rounded to a lower precision",
            "layout",
        )
    elif found.region is not None:
        factor = found.region.factor
        times = "" if factor is None else f", where it is {number_text(factor)}x the right gradient"
        where_alone = f"the gradient is wrong only in {found.region.where}{times}"
        yield name_cause("wrong-shard", where_alone)


def _factor_causes(facts: LayoutFacts, of: LayoutParameter) -> list[Diagnosis]:
    times = f"the gradient is {number_text(of.factor or 0.0)}x the right gradient"
    parts, found = facts.micro_batches, list[Diagnosis]()
    if parts > 1 and ((added_up := of.is_scaled_by(parts)) or of.is_scaled_by(1 / parts)):
        how = "their gradients are summed" if added_up else "it is divided by them twice"
        evidence = f"{times}: there are {parts} micro-batches, and {how}"
        found.append(name_cause("pipeline-not-scaled", evidence))
    for axis, size in facts.axes:
        over = f"{times}: the axis {axis} has {size} ranks, over which it is"
        if size < 2 or not (of.is_scaled_by(size) or of.is_scaled_by(1 / size)):
            continue
        if of.is_scaled_by(size):
            evidence = f"{over} summed"
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
    """Yield the axes whose sizes multiply to a ratio or its inverse."""
    axes = [(name, size) for name, size in facts.axes if size > 1]
    for count in range(1, len(axes) + 1):
        for chosen in combinations(axes, count):
            size = prod(size for _, size in chosen)
            names = " x ".join(name for name, _ in chosen)
            if _is_close(ratio, size):
                yield f"the size of {names}"
            elif _is_close(ratio, 1 / size):
                yield f"1 / the size of {names}"
    if facts.micro_batches > 1 and _is_close(ratio, facts.micro_batches):
        yield "the number of micro-batches"


def _is_close(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=SAME_FACTOR)


def _backward_cause(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """Name a backward that is right near the loss and wrong in earlier layers."""
    if not facts.right or facts.loss_is_wrong:
        return
    last = facts.parameters[-1]
    yield name_cause(
        "wrong-backward-communication",
        f"step {facts.step}: the loss is right, and so are the gradients of "
        f"{', '.join(facts.right)}; they are wrong from {last.module or last.name} on toward the "
        "inputs",
    )


def _replicas(failed: Failures) -> Diagnosis:
    result = failed["agreement", "-"]
    return name_cause(
        "replicated-gradients-differ",
        "every gradient is within its bound, but ranks that hold the same parameter are not "
        f"bit-identical: {place_of_divergence(result)}",
    )


def _communication_causes(failed: Failures, facts: LayoutFacts) -> list[Diagnosis]:
    checks = {check for check, _ in failed}
    if facts.form == "metric" and facts.parameters:
        return [_metric_cause(facts, facts.parameters[0])]
    found = list(_exchanged_gradients(facts)) if facts.parameters else []
    if facts.parameters and facts.loss_is_wrong and not found:
        found = [_wrong_loss(facts)]
    if not found and "buffers" in checks:
        result = next(result for (check, _), result in failed.items() if check == "buffers")
        evidence = (
            f"{place_of_divergence(result)}differs from the single-process reference on the global "
            "batch"
        )
        found = [name_cause("buffers-differ", evidence, "exchanging")]
    return found


def _world(facts: LayoutFacts) -> int:
    return prod(size for _, size in facts.axes)


def _exchanged_gradients(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """Yield one diagnosis per cause, with its parameters."""
    wrong, place = facts.parameters, f"step {facts.step}"
    if all(found.unexchanged for found in wrong):
        also = ", and so is the loss" if facts.loss_is_wrong else ""
        yield name_cause(
            "missing-sync",
            f"{place}: the gradient is the mean of the ranks' local gradients, each from its own "
            f"samples{also}",
            "loss",
        )
        return
    by_cause: dict[Diagnosis, list[LayoutParameter]] = defaultdict(list)
    for found in wrong:
        if (one := _exchanged_factor(facts, found)) is not None:
            by_cause[one].append(found)
    for one, found_in in by_cause.items():
        names = first_names_text([found.name for found in found_in])
        yield msgspec.structs.replace(one, evidence=f"{place}, {names}: {one.evidence}")
    if by_cause or facts.loss_is_wrong:
        return
    names = first_names_text([found.name for found in wrong])
    most = max(found.distance for found in wrong)
    others = len(facts.right) and f", and the gradients of {', '.join(facts.right)} are right"
    yield name_cause(
        "wrong-backward-communication",
        f"{place}, {names}: the loss matches the single-process reference, but the gradient does "
        f"not: the error is {100 * most:.2g}% of its norm{others or ''}",
        "loss",
    )


def _exchanged_factor(facts: LayoutFacts, found: LayoutParameter) -> Diagnosis | None:
    if found.absent:
        evidence = f"there is no gradient on {ranks_in_words(found.absent)}"
        return name_cause("missing-gradient", evidence)
    if found.factor is None:
        return None
    times = f"the gradient is {number_text(found.factor)}x the single-process reference"
    world = _world(facts)
    if found.is_scaled_by(world):
        return name_cause("missing-division", f"{times}, the world size", "loss")
    if found.is_scaled_by(1 / world):
        return name_cause("double-division", f"{times}, 1 / world size", "loss")
    return name_cause("wrong-divisor", times, "layout")


def _wrong_loss(facts: LayoutFacts) -> Diagnosis:
    got, right = facts.loss, facts.expected_loss
    ratio = f", {number_text(got / right)}x the reference" if right else ""
    return name_cause(
        "wrong-output",
        f"step {facts.step}: the loss over all ranks is {number_text(got)}, but "
        f"{number_text(right)} in the single-process reference{ratio}",
        "loss",
    )


def _metric_cause(facts: LayoutFacts, found: LayoutParameter) -> Diagnosis:
    place, world = f"step {facts.step}: compute()", _world(facts)
    if found.unexchanged:
        evidence = f"{place} returns on each rank the result of its own samples"
        return name_cause("missing-sync", evidence, "metric")
    if found.even:
        evidence = f"{place} returns the mean of the ranks' results, weighted equally"
        return name_cause("unweighted-mean", evidence, "metric")
    if len(found.wrong) < world:
        evidence = f"{place} returns a different result only on {ranks_in_words(found.wrong)}"
        return name_cause("wrong-output", evidence, "metric")
    if found.factor is not None:
        times = f"{place} returns {number_text(found.factor)}x the single-process result"
        if found.is_scaled_by(world):
            return name_cause("missing-division", times, "metric")
        if found.is_scaled_by(1 / world):
            return name_cause("double-division", times, "metric")
        return name_cause("wrong-divisor", times, "metric")
    where_wrong = f" in {found.region.where}" if found.region is not None else ""
    evidence = (
        f"{place} differs from the single-process result{where_wrong}: the error is "
        f"{100 * found.distance:.2g}% of its norm"
    )
    return name_cause("wrong-output", evidence, "metric")
