"""Derives causes of wrong gradients from measurements, over all families and measured steps.

A cause is named if it explains every wrong gradient of every rank at the first measured step. If
parameters went wrong in different ways, it must explain every parameter that it lists. If the
measurements cannot distinguish several such causes, all are named.
"""

from collections.abc import Sequence
from math import isfinite
from types import ModuleType

import msgspec

from distcheck.judge.diagnosis import parts, weights
from distcheck.judge.diagnosis.combinations import all_parallel, combination_distance
from distcheck.judge.diagnosis.measurements import Measurements, ParameterFacts, StepFacts
from distcheck.judge.diagnosis.wording import (
    coefficients_text,
    first_names_text,
    number_text,
    parameters_text,
    positions_text,
)
from distcheck.records import Diagnosis, quoted
from distcheck.records.causes import APART, name_cause
from distcheck.records.odd_ranks import grouped, ranks_in_words

FAMILIES: tuple[ModuleType, ...] = (weights, parts)


def explain(facts: Measurements) -> list[Diagnosis]:
    """Return the causes of wrong gradients; empty if none explains them."""
    return [_add_ranks_with_data(one, facts) for one in _explain(facts)]


def explain_local_gradients(facts: Measurements) -> list[Diagnosis]:
    """Return causes of wrong local gradients, if everything derived from them is right."""
    found = next((causes_before_synchronization(step) for step in facts.steps if step.left), [])
    return [_add_ranks_with_data(one, facts) for one in found]


def _add_ranks_with_data(found: Diagnosis, facts: Measurements) -> Diagnosis:
    """Add the ranks with data to the evidence if some have none: lists by rank omit those."""
    ranks = facts.steps[0].ranks
    if len(ranks) in (0, facts.world):
        return found
    among = f" (of {ranks_in_words(ranks)}, which {'have' if len(ranks) > 1 else 'has'} data)"
    return _extend_evidence(found, after=among)


def _extend_evidence(found: Diagnosis, *, before: str = "", after: str = "") -> Diagnosis:
    return msgspec.structs.replace(found, evidence=f"{before}{found.evidence}{after}")


def _explain(facts: Measurements) -> list[Diagnosis]:
    steps = [step for step in facts.steps if step.parameters or step.not_finite or step.missing]
    if not steps:
        return []
    found = explain_step(steps[0])
    if not found and len(steps) > 1 and _holds_zeros(steps[0]):
        late = [f for f in explain_step(steps[1]) if f.cause == "stale-gradient"]
        before = f"step {steps[0].step}: ranks hold zeros; "
        found = [_extend_evidence(f, before=before) for f in late]
    if len(steps) > 1 and len(found) > 1:
        again = {finding.cause for finding in explain_step(steps[1])}
        found = [finding for finding in found if finding.cause in again] or found
    return found


def explain_step(step: StepFacts) -> list[Diagnosis]:
    """Return the causes of one step's wrong gradients."""
    if step.not_finite is not None:
        return [_not_finite(step)]
    if step.missing_elsewhere:
        return [_missing(step)]
    before = causes_before_synchronization(step)
    shorter = any(found.cause == "low-precision" for found in before)
    if before and (step.mean_of_left or shorter):  # such rounding resembles any other cause
        return before
    found = _merge_alternatives(explain_all(step, step.parameters))
    if not found and len(step.parameters) > 1:
        found = _causes_by_parameter(step)
    if not found or any(one.cause == "unexplained" for one in found):
        found = _besides_weights(step) or found
    if step.removed and not found:
        return [*before, _removed(step)]
    return [*before, *(_add_missing_gradients(finding, step) for finding in found)]


def _besides_weights(step: StepFacts) -> list[Diagnosis]:
    """Return the causes that explain all that differs from an unweighted mean, and the missing
    weights.
    """
    if not step.plain or step.tokens:
        return []
    world, mean = len(step.shares), "the unweighted mean over the ranks"
    plain = msgspec.structs.replace(
        step, parameters=step.plain, plain=(), shares=(1.0 / world,) * world, matches=(), mean=mean
    )
    found = _merge_alternatives(explain_all(plain, step.plain))
    where = f"step {step.step}, {parameters_text(step, step.parameters)}"
    return [*found, weights.cause_of_equal_weights(step, where)] if found else []


def _drop_consequence(found: list[Diagnosis]) -> list[Diagnosis]:
    """Remove a consequence: if only one rank holds the mean of whole parameters, the other ranks'
    local gradients there are no second cause.
    """
    alone = any(one.cause == "single-rank-gradient" for one in found)
    return [one for one in found if not alone or not one.evidence.endswith(parts.OWN_THERE)]


def _add_missing_gradients(found: Diagnosis, step: StepFacts) -> Diagnosis:
    unused = [(name, rank) for name, rank in step.missing if name not in step.removed]
    if not unused:
        return found
    ranks = positions_text(step, sorted({rank for _, rank in unused}))
    names = list(dict.fromkeys(name for name, _ in unused))
    absent = f"; {first_names_text(names, 3)} got no gradient on {ranks}, which did not use them"
    return _extend_evidence(found, after=absent)


def causes_before_synchronization(step: StepFacts) -> list[Diagnosis]:
    """Return causes before synchronization. If the loss is scaled equally on all ranks, and ranks
    hold the mean, the result is empty: the scale is a separate cause.
    """
    multiples = [step.left_factors[found.rank] for found in step.left]
    if not step.left or (step.mean_of_left and None not in multiples):
        return []
    ranks = positions_text(step, [found.rank for found in step.left])
    names = list(dict.fromkeys(name for found in step.left for name in found.parameters))
    what = "all parameters" if len(names) == step.total else ", ".join(names[:6])
    what += f" and {len(names) - 6} more" if len(names) > 6 and len(names) < step.total else ""
    evidence = f"step {step.step}: the local gradient on {ranks} is not the gradient of the shard"
    evidence += f" there, in {what}"
    sources = {found.source for found in step.left}
    if sources != {-1} and len(sources) == 1 and len(step.left) == len(step.shares) - 1:
        source = positions_text(step, [*sources])
        evidence += (
            f": it is the gradient of {source}'s shard, as if all ranks had {source}'s samples"
        )
    elif None not in multiples:
        shown = ", ".join(number_text(f) for f in step.left_factors if f is not None)
        evidence += f": ranks held {shown} times that gradient"
    else:
        most = max(found.distance for found in step.left)
        evidence += f" (differing by up to {most:.2g} of its norm)"
    if step.mean_of_left:
        evidence += "; ranks hold the right mean of the local gradients, so the all-reduce is right"
    if all(found.buffers for found in step.left):
        buffers = list(dict.fromkeys(name for found in step.left for name in found.buffers))
        return [
            name_cause(
                "buffers-differ",
                f"{evidence}. It is bit-identical if other ranks' buffers replace the promised "
                f"ones: {first_names_text(buffers)}",
                "not-sent",
            )
        ]
    dtypes = {found.autocast for found in step.left}
    if len(dtypes) == 1 and dtypes != {""}:
        (dtype,) = dtypes
        return [
            name_cause(
                "low-precision",
                f"{evidence}; it is the gradient of the shard under torch.autocast in {dtype}",
                "autocast",
                dtype=dtype,
            )
        ]
    return [name_cause("wrong-local-gradient", evidence)]


def explain_all(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    """Return the causes, of any family, that explain these parameters together."""
    if not any(parameter.wrong for parameter in parameters):
        return []
    found = _drop_consequence([f for family in FAMILIES for f in family.explain(step, parameters)])
    return found or parts.causes_of_partial_sums(step, parameters)


def _causes_by_parameter(step: StepFacts) -> list[Diagnosis]:
    """Return the causes of parameters that went wrong in different ways, grouped by cause."""
    groups = grouped(
        step.parameters,
        lambda one: tuple(dict.fromkeys(found.cause for found in explain_all(step, [one]))),
    )
    found: list[Diagnosis] = []
    whole = sum(squared_error(step, p) for p in step.parameters)
    shares = {
        causes: sum(squared_error(step, p) for p in parameters) / whole if whole else 0.0
        for causes, parameters in groups.items()
    }
    for causes, parameters in sorted(groups.items(), key=lambda item: -shares[item[0]]):
        together = [f for f in explain_all(step, parameters) if f.cause in causes]
        singly = [f for p in parameters for f in explain_all(step, [p]) if f.cause in causes]
        part = f" ({format_percent(shares[causes])} of the error)" if len(groups) > 1 else ""
        found += [_extend_evidence(f, after=part) for f in _merge_alternatives(together or singly)]
    unexplained = groups.get((), [])
    if found and unexplained:
        found.append(
            name_cause(
                "unexplained",
                f"step {step.step}: no known mistake explains "
                f"{parameters_text(step, unexplained)} ({format_percent(shares[()])} of the error)",
                "beside-others",
            )
        )
    return found


def format_percent(share: float) -> str:
    """Format a fraction as a percentage. Negligible fractions get no digits."""
    # Heuristic: smaller fractions are listed only for completeness.
    return "under 0.01%" if share < 1e-4 else f"{100 * share:.3g}%"


def squared_error(step: StepFacts, parameter: ParameterFacts) -> float:
    """Return the squared L2 distance of a parameter's gradients from the mean, over all ranks."""
    errors = [combination_distance(parameter, rank, step.shares) for rank in parameter.wrong]
    return sum(error * error for error in errors if isfinite(error))


# Causes that can hold together; any others exclude each other for the same gradients.
_SIDE_BY_SIDE = (
    {"unweighted-mean", "missing-division"},
    {"unweighted-mean", "double-division"},
    {"unweighted-mean", "wrong-divisor"},
    {"unweighted-tokens", "missing-division"},
    {"unweighted-tokens", "double-division"},
    {"unweighted-tokens", "wrong-divisor"},
    {"missing-sync", "dropped-rank"},
    {"single-rank-gradient", "missing-division"},
    {"dropped-rank", "missing-division"},
    {"dropped-rank", "wrong-divisor"},
    {"duplicated-rank", "missing-division"},
    {"duplicated-rank", "wrong-divisor"},
)


def _merge_alternatives(found: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Keep one finding per cause; findings that exclude each other list the alternatives."""
    by_cause: dict[str, Diagnosis] = {}
    for finding in found:
        by_cause.setdefault(finding.cause, finding)
    if len(by_cause) < 2 or set(by_cause) in _SIDE_BY_SIDE:
        return list(by_cause.values())
    result = []
    for cause, finding in by_cause.items():
        others = " or ".join(other for other in by_cause if other != cause)
        apart = f"; {APART} {others}"
        if cause in ("single-rank-gradient", "dropped-rank", "duplicated-rank"):
            apart += " (a world of 3 ranks can)"
        result.append(_extend_evidence(finding, after=apart))
    return result


def _holds_zeros(step: StepFacts) -> bool:
    """Return True if every wrong gradient is zero: nothing has arrived yet."""
    return all(
        not any(p.projected[rank]) and not p.remainder[rank]
        for p in step.parameters
        for rank in p.wrong
    )


def _missing(step: StepFacts) -> Diagnosis:
    names = list(dict.fromkeys(name for name, _ in step.missing))
    ranks = positions_text(step, sorted({rank for _, rank in step.missing}))
    return name_cause(
        "partial-sync",
        f"step {step.step}: {first_names_text(names)} ({len(names)} of "
        f"{step.total + len(names)} parameters) got no gradient on {ranks}, which did not use them "
        "at that step, and the other ranks hold their local gradients, which were never sent",
        "unused",
    )


def _removed(step: StepFacts) -> Diagnosis:
    return name_cause(
        "gradient-removed",
        f"step {step.step}: `.grad` of {first_names_text(step.removed)} is None on every rank when "
        "the optimizer steps, although backward produced a gradient",
    )


def _not_finite(step: StepFacts) -> Diagnosis:
    seen = step.not_finite
    assert seen is not None
    where = f"step {step.step}, parameter {quoted(seen.parameter)}, "
    where += f"{positions_text(step, [seen.rank])}: "
    if seen.hidden:
        before = positions_text(step, seen.before)
        return name_cause(
            "nonfinite",
            f"{where}{seen.count:,} elements are finite, but the local gradient on {before} is "
            "infinite or NaN there",
            "hidden",
        )
    where += f"{seen.count:,} elements are "
    if seen.before:
        before = positions_text(step, seen.before)
        return name_cause(
            "nonfinite",
            f"{where}infinite or NaN, as they already were in the local gradient on {before}",
            "before",
            ranks=before,
        )
    evidence = f"{where}infinite or NaN, but every rank's local gradient is finite"
    return name_cause("nonfinite", evidence)


def describe_unexplained(facts: Measurements) -> str:
    """Return the strongest evidence of unexplained wrong gradients, as a sentence."""
    step = next((step for step in facts.steps if step.parameters), None)
    if step is None:
        return ""
    wrong = sorted({rank for p in step.parameters for rank in p.wrong})
    be = "are" if len(step.parameters) > 1 else "is"
    text = f"step {step.step}: {parameters_text(step, step.parameters)} {be} wrong on "
    text += positions_text(step, wrong)
    groups = "; ".join(positions_text(step, group) for group in step.alike if len(group) > 1)
    agree = f"only these ranks agree: {groups}" if groups else "no two ranks agree"
    agree = "all ranks agree" if len(step.alike) == 1 else agree
    text += f"; {agree}" if len(step.shares) > 1 else ""
    if step.mean_of_left:
        return (
            f"{text}; they hold the right mean of the local gradients, so the all-reduce is right "
            "and its inputs are not"
        )
    fit = step.fits[wrong[0]] if step.fits else None
    if all_parallel(step, step.parameters):
        return (
            f"{text}; the local gradients are multiples of each other, so their weights cannot be "
            "measured: try a workload in which they are not"
        )
    if fit is None or not fit.identified:
        return text
    text += f"; {coefficients_text(step, step.fits, wrong[0])}"
    share = number_text(100 * fit.residual)
    if fit.residual > max(fit.tolerance):
        text += f", and {share}% of it is not a combination of them"
    return text


def describe_local_gradients(facts: Measurements) -> str:
    for step in facts.steps:
        if step.left_factors and any(f is not None and f != 1.0 for f in step.left_factors):
            shown = ", ".join("no multiple" if f is None else f"{f:.7g}" for f in step.left_factors)
            return f"before the all-reduce, ranks held {shown} times their shard's gradient"
    return ""
