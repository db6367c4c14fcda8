"""Causes of wrong gradients, losses and replicas in a model-parallel layout.

Backward goes from the loss to the inputs, so what is wrong in one layer is passed on to those
before it: a cause is looked for in the last module that has a wrong gradient.
"""

from collections.abc import Iterator
from itertools import combinations
from math import isclose, prod

from distcheck.judge.diagnosis.findings import number_text, ranks_text
from distcheck.judge.diagnosis.layout_facts import LayoutFacts, LayoutParameter, WrongOutputs
from distcheck.judge.diagnosis.places import Failures, where
from distcheck.records import Diagnosis

# Chosen: a share of its norm by which sums in bfloat16 are off at most, and mistakes seldom.
_OF_PRECISION = 2.0**-6
_SAME_FACTOR = 1e-4  # Chosen, relative: two factors that are one
_APART = "; ranks that read the same samples have different losses"
_OF_FORWARD = (
    "look at what is added up or put together in the forward pass: a bias that is added on every "
    "rank, a part that is counted twice or left out, the order of the parts, a mean over a part of "
    "the batch or of its tokens, a mask that is the same on ranks that hold different units"
)
_OF_RANKS_APART = (
    "look for what each rank computes by itself where all must have one result: a sum, a maximum "
    "or a mean that is not taken over all ranks, such as that of a softmax over divided classes, "
    "or a random mask that differs between ranks that hold the same units"
)


def explain(failed: Failures, facts: LayoutFacts) -> list[Diagnosis]:
    """The causes that what was measured carries."""
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
    return Diagnosis(
        cause="wrong-output",
        evidence=f"step {facts.step}: the loss is {number_text(facts.loss)}, and the whole batch's "
        f"is {number_text(facts.expected_loss)}{same}: the forward pass is wrong, and gradients "
        f"follow from it{_APART if facts.apart else ''}",
        suggestion=_OF_RANKS_APART if facts.apart else _OF_FORWARD,
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
    return Diagnosis(
        cause="wrong-output",
        evidence=f"step {facts.step}: the loss is right and {gradients}, but what the model "
        f"returns on rank {found.rank} is not: {how}",
        suggestion="compare what forward returns with what the model returns in one process: look "
        "at what is subtracted, scaled or reordered after the last layer",
    )


def _of_gradients(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """One diagnosis a cause, each with its parameters; of the last module that has wrong ones."""
    last = [p for p in facts.parameters if p.module == facts.parameters[-1].module]
    by_cause: dict[tuple[str, str, str], list[str]] = {}
    for parameter in last:
        for found in _causes(facts, parameter):
            by_cause.setdefault(found, []).append(parameter.name)
    earlier = len({p.name for p in facts.parameters}) - len(last)
    several = "parameters of earlier layers are" if earlier > 1 else "parameter before them is"
    follow = f"; {earlier} {several} wrong as well" if earlier else ""
    for (cause, evidence, suggestion), names in by_cause.items():
        yield Diagnosis(
            cause=cause,
            evidence=f"step {facts.step}, {', '.join(names)}: {evidence}{follow}",
            suggestion=suggestion,
        )


def _causes(facts: LayoutFacts, found: LayoutParameter) -> Iterator[tuple[str, str, str]]:
    """(cause, evidence, suggestion) of one parameter."""
    if found.absent:
        yield (
            "missing-gradient",
            f"there is no gradient on {ranks_text(found.absent)}",
            "look for a tensor that leaves the graph on its way: one that was received or copied, "
            "and whose gradient is never sent back",
        )
    elif found.earlier or found.added:
        what = "that of the step before" if found.earlier else "the sum of this step's and the last"
        yield (
            "stale-gradient" if found.earlier else "accumulated-gradient",
            f"the gradient is {what}",
            "clear gradients before backward, and exchange them after it",
        )
    elif found.factor is not None:
        yield from _of_factor(facts, found.factor)
    elif found.shard:
        yield (
            "no-sync",
            "every rank holds the gradient of its own data coordinate's samples",
            "average gradients over the axis data, of every part of the model",
        )
    elif found.even:
        yield (
            "unweighted-mean" if not facts.by_tokens else "unweighted-tokens",
            "it is the mean of the data coordinates' gradients, each of which counts alike",
            "weight each data coordinate by its number of samples (step.weight)"
            if not facts.by_tokens
            else "weight each data coordinate by its number of tokens (step.tokens)",
        )
    elif found.shares:
        yield (
            "missing-sum",
            f"ranks along the axis {found.shares} hold different parts of the gradient, which add "
            "up to the right one",
            f"add up this gradient over the axis {found.shares} (all_reduce): each rank has seen "
            "only its own part of what the parameter was used for",
        )
    elif found.lost:
        yield (
            "lost-micro-batch",
            "the gradient lacks that of micro-batch " + ", ".join(map(str, found.lost)),
            "run backward for every micro-batch, and add its gradient to the others'",
        )
    elif found.mixed:
        yield (
            "wrong-group",
            f"ranks along the axis {found.mixed} hold different pieces of the parameter, and each "
            "holds the mean or the sum of all their pieces' gradients",
            f"leave the axis {found.mixed} out of this exchange: only ranks of the same piece may "
            "average it (a process group of the axis data)",
        )
    elif found.distance < _OF_PRECISION:
        yield (
            "low-precision",
            f"the gradient is within {100 * found.distance:.2g} % of the right one, and no closer: "
            "something on its way is rounded to a shorter dtype",
            "exchange activations and their gradients in the dtype that they are computed in",
        )
    elif found.region is not None:
        factor = found.region.factor
        times = "" if factor is None else f", where it is {number_text(factor)} times the right one"
        yield (
            "wrong-piece",
            f"the gradient is wrong in {found.region.where} alone{times}",
            "look at the rank that holds these elements: the others computed theirs rightly",
        )


def _of_factor(facts: LayoutFacts, factor: float) -> Iterator[tuple[str, str, str]]:
    said = f"the gradient is {number_text(factor)} times the right one"
    known = False
    for cause, why, suggestion in _factors(facts, factor):
        known = True
        yield cause, f"{said}: {why}", suggestion
    if not known:
        yield "wrong-divisor", said, "look at what scales this gradient, or the one that enters it"


def _factors(facts: LayoutFacts, factor: float) -> Iterator[tuple[str, str, str]]:
    sizes = dict(facts.axes)
    parts = facts.micro_batches
    if parts > 1 and (_same(factor, parts) or _same(factor, 1 / parts)):
        how = "their gradients are added up" if factor > 1 else "it is divided by them twice"
        yield (
            "micro-batch-scale",
            f"there are {parts} micro-batches, and {how}",
            "let each micro-batch's mean loss count for its share of the samples, once",
        )
    for axis in [name for name, size in sizes.items() if size > 1]:
        size = sizes[axis]
        if _same(factor, size):
            cause = "missing-division" if axis == "data" else "extra-sum"
            yield (
                cause,
                f"the axis {axis} has {size} ranks, over which it was added up",
                f"divide by the number of data coordinates, {size}"
                if axis == "data"
                else f"leave out the sum over the axis {axis}: every rank has the whole gradient",
            )
        elif _same(factor, 1 / size):
            cause = "double-division" if axis == "data" else "extra-division"
            yield (
                cause,
                f"the axis {axis} has {size} ranks, over which it was averaged",
                f"divide once by the {size} data coordinates"
                if axis == "data"
                else _share_one_batch(facts, axis),
            )


def _share_one_batch(facts: LayoutFacts, axis: str) -> str:
    if facts.by_tokens:
        return (
            f"do not divide by the ranks of the axis {axis}, and do not add up tokens over it: its "
            "ranks read the same ones, which count once"
        )
    return f"do not divide by the ranks of the axis {axis}, which share one batch"


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
    return isclose(one, other, rel_tol=_SAME_FACTOR)


def _of_backward(facts: LayoutFacts) -> Iterator[Diagnosis]:
    """Layers near the loss are right, and those before them are not, in no simple way."""
    if not facts.right or facts.loss_is_wrong:
        return
    last = facts.parameters[-1]
    yield Diagnosis(
        cause="broken-backward",
        evidence=f"step {facts.step}: the loss is right, and so are the gradients of "
        f"{', '.join(facts.right)}; they are wrong from {last.module or last.name} on towards the "
        "inputs",
        suggestion="look at what backward exchanges between these layers: a forward that copies "
        "or gathers has a sum or a slice in its backward",
    )


def _replicas(failed: Failures) -> Diagnosis:
    result = failed["agreement", "-"]
    return Diagnosis(
        cause="replicas-differ",
        evidence="every gradient is within its bound, but ranks that hold the same parameter do "
        f"not hold the same bits of it: {where(result)}",
        suggestion="exchange the gradient of what several ranks hold, or send one rank's to the "
        "others, so that all hold one result; sums of one order on every rank do",
    )
