"""Causes found in single elements: partial synchronization, gradients of a different parameter or
an earlier step, and rounding to a lower-precision dtype.
"""

from collections.abc import Mapping, Sequence

from distcheck.judge.diagnosis.combinations import combination_bound, combination_distance
from distcheck.judge.diagnosis.measurements import (
    LEAST_FOR_A_GRID,
    GradientMatch,
    Measurements,
    ParameterFacts,
    StepFacts,
)
from distcheck.judge.diagnosis.wording import parameters_text, positions_text
from distcheck.records import Diagnosis, quoted
from distcheck.records.causes import name_cause

OWN_THERE = "ranks hold their local gradients there, but not in the other parameters"
_LEAST_OF_A_KIND = 4  # elements over all ranks; fewer may match by chance


def explain(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    found = _partial(step, parameters)
    found = found or _other_kinds(step, parameters)
    found += [*_order(step, parameters), *_earlier_step_causes(step, parameters)]
    return found + _rounding(step, parameters)


def _partial(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    """Name elements that are the mean or local, if both occur (possibly in other parameters)."""
    own = mean = elements = 0
    for parameter in parameters:
        for rank in parameter.wrong:
            if parameter.of_either[rank] < parameter.elements:
                return []
            # An element may be both, such as a zero; then it shows nothing.
            own += parameter.elements - parameter.of_mean[rank]
            mean += parameter.elements - parameter.of_own[rank]
            elements += parameter.elements
    if not own or (not mean and len(parameters) == step.total):
        return []
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    if mean:
        what = (
            f"{own:,} of {elements:,} elements (over all ranks) are the local gradient, and the "
            "others are "
        )
        what += step.mean
    else:
        what = OWN_THERE
    return [name_cause("partial-sync", f"{where}: {what}")]


# By kind of element: cause, variant of the suggestion, description.
_KINDS = {
    "zero": ("partial-sync", "zeros", "zero"),
    "own / W": ("partial-sync", "divided", "1/W of the local gradient"),
    "sum": ("missing-division", "elements", "the sum over all ranks, not divided"),
    "any rank's": (
        "single-rank-gradient", "chunks",
        "a single rank's local gradient, or its share of the mean",
    ),
}  # fmt: skip
_PARTIAL_SUMS = {"some ranks'": ("dropped-rank", "chunks", "sums that lack some ranks")}


def causes_of_partial_sums(
    step: StepFacts, parameters: Sequence[ParameterFacts]
) -> list[Diagnosis]:
    """Name elements that lack ranks, if these ranks differ and no other cause fits."""
    return _other_kinds(step, parameters, _PARTIAL_SUMS)


def _other_kinds(
    step: StepFacts,
    parameters: Sequence[ParameterFacts],
    kinds: Mapping[str, tuple[str, str, str]] = _KINDS,
) -> list[Diagnosis]:
    """Name elements that are the mean or of one other kind, if both occur or other parameters are
    right; chunks of single ranks, or of some, may be everything.
    """
    found = []
    for kind, (cause, variant, what) in kinds.items():
        either = {p.name: dict(p.kinds).get(kind) for p in parameters}
        mean = other = elements = 0
        for parameter in parameters:
            counts = either[parameter.name]
            for rank in parameter.wrong:
                alone = kind == "any rank's" and parameter.of_own[rank] == parameter.elements
                if counts is None or counts[rank] < parameter.elements or alone:
                    break
                mean += parameter.of_mean[rank]
                other += parameter.elements - parameter.of_mean[rank]
                elements += parameter.elements
            else:
                continue
            break
        else:
            if other >= _LEAST_OF_A_KIND and _are_parts(step, kind, mean):
                where = f"step {step.step}, {parameters_text(step, parameters)}"
                rest = f", and the others are {step.mean}" if mean else ""
                evidence = f"{where}: {other:,} of {elements:,} elements (over all ranks) are "
                found.append(name_cause(cause, f"{evidence}{what}{rest}", variant))
    return found[:1]


def _are_parts(step: StepFacts, kind: str, mean: int) -> bool:
    """Return True if there is something else in addition to elements of a kind."""
    if kind == "any rank's" or kind in _PARTIAL_SUMS:
        return True
    if kind != "zero":
        return mean > 0
    whole = step.parameters
    something = any(any(p.projected[r]) or p.remainder[r] for p in whole for r in p.wrong)
    return something or len(whole) < step.total


def _order(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    others = [m for m in step.matches if m.kind == "parameter"]
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    if _all_match(parameters, others):
        names = {p.name for p in parameters}
        pairs = {m.parameter: m.other for m in others if m.parameter in names}
        shown = ", ".join(
            f"{quoted(name)} holds the gradient of {quoted(other)}"
            for name, other in list(pairs.items())[:4]
        )
        wrong = {p.name for p in step.parameters}
        if len(set(pairs.values())) < len(pairs) or not set(pairs.values()) <= wrong:
            holder = quoted(*pairs.values()) if len(pairs) == 1 else "a different parameter"
            what = f"{shown}, and {holder} holds it as well"
            return [name_cause("bucket-reused-in-flight", f"{where}: {what}")]
        return [name_cause("wrong-parameter-order", f"{where}: {shown}")]
    mixed = [m for m in step.matches if m.kind in ("parameter", "mixed")]
    if _all_match(parameters, mixed):
        first = next(m for m in mixed if m.ranks)
        what = (
            f"in the result of {positions_text(step, [first.rank])} for {quoted(first.parameter)}, "
            f"{positions_text(step, first.ranks)} contributed "
            f"{'its' if len(first.ranks) == 1 else 'their'} gradient of {quoted(first.other)}"
        )
        if first.other not in {p.name for p in step.parameters}:
            what += f", although the result for {quoted(first.other)} itself is right"
            return [name_cause("bucket-reused-in-flight", f"{where}: {what}")]
        return [name_cause("wrong-parameter-order", f"{where}: {what}")]
    permuted = [m for m in step.matches if m.kind == "permuted"]
    if len(parameters) == len(step.parameters) and _all_match(parameters, permuted):
        what = f"the elements are those of {step.mean}, but at other indices"
        return [name_cause("wrong-parameter-order", f"{where}: {what}")]
    return []


# Remains of an earlier step's gradient, by the kind of a match.
_LEFT = {
    "sum": "the sum of the means of steps {past} to {step}",
    "added": "this step's mean plus the gradients of step {past}",
    "left": "this step's mean plus leftover gradients of step {past} on some ranks, which did "
    "not clear them before backward",
}


def _earlier_step_causes(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    """Name remains of earlier steps: a stale or accumulated gradient."""
    where = f"step {step.step}, {parameters_text(step, parameters)}"

    def are(kind: str, past: int) -> bool:
        matches = [m for m in step.matches if m.kind == kind and m.step == past]
        return _all_match(parameters, matches)

    found = [
        name_cause("stale-gradient", f"{where}: ranks hold the mean gradient of step {past}")
        for past in range(step.step)
        if are("earlier", past)
    ]
    for past in range(step.step):
        kind = next((k for k in _LEFT if are(k, past)), "")
        if kind:
            text = f"{where}: ranks hold {_LEFT[kind].format(past=past, step=step.step)}"
            of = "some-ranks" if kind == "left" else "usual"
            found.append(name_cause("accumulated-gradient", text, of))
            break
    return found


def _all_match(parameters: Sequence[ParameterFacts], matches: Sequence[GradientMatch]) -> bool:
    found = {(match.parameter, match.rank) for match in matches}
    return all((p.name, rank) in found for p in parameters for rank in p.wrong)


_MOST_NOISE = 1e-2  # Heuristic, relative to the sum: larger errors are another gradient
_WIDTHS = ("float32", "float16", "bfloat16")  # by increasing rounding error


def _is_error_size_conclusive(step: StepFacts, parameters: Sequence[ParameterFacts]) -> bool:
    """Return True if the size of errors is conclusive: no larger parameters are wrong in another
    way, and not all have few elements next to others.
    """
    own = {parameter.name for parameter in parameters}
    others = [parameter for parameter in step.parameters if parameter.name not in own]
    if all(p.elements < LEAST_FOR_A_GRID for p in parameters):
        return not others
    in_another_way = [p for p in others if not all(p.shorter[rank] for rank in p.wrong)]
    return all(p.elements < LEAST_FOR_A_GRID for p in in_another_way)


def dtype_rounded_to(facts: Measurements) -> str:
    """Return the low-precision dtype in which all wrong gradients are representable, at every step,
    or "". Tensors of a few elements are ignored, since they may be representable by chance.
    """
    wrong = [
        (parameter.shorter[rank], parameter.on_grid[rank])
        for step in facts.steps
        for parameter in step.parameters
        if parameter.elements >= LEAST_FOR_A_GRID
        for rank in parameter.wrong
    ]
    dtypes = {dtype for dtype, _ in wrong}
    return dtypes.pop() if len(dtypes) == 1 and all(on_grid for _, on_grid in wrong) else ""


def _rounding(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    dtypes = {p.shorter[rank] for p in parameters for rank in p.wrong}
    if not dtypes or "" in dtypes:
        return _small_noise(step, parameters)
    # Small parameters count if they have enough elements together, and none is large.
    enough = sum(p.elements for p in parameters) >= LEAST_FOR_A_GRID
    counting = [p for p in parameters if p.elements >= LEAST_FOR_A_GRID] or parameters
    # Weights of gradients cannot explain roundings, and only rounding leaves all on a grid.
    grid = enough and all(p.on_grid[rank] for p in counting for rank in p.wrong)
    beyond = any(
        p.remainder[rank] > combination_bound(step, p, step.shares)
        for p in parameters
        for rank in p.wrong
    )
    if not grid and not (beyond and _is_error_size_conclusive(step, parameters)):
        return []
    dtype = max(dtypes, key=_WIDTHS.index)
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    mean = f"{where}: {step.mean}, up to errors "
    terms = all(p.of_terms[rank] if p.of_terms else False for p in parameters for rank in p.wrong)
    proof = f"; every result is representable in {dtype} (or 1/W of such a value)" if grid else ""
    proof = proof or (f"; each rank's gradient was rounded to {dtype} first" if terms else "")
    found = [
        name_cause(
            "low-precision",
            f"{mean}that fit rounding to {dtype} and exceed the rounding of the gradients' own "
            f"dtype{proof}",
            "undeclared" if step.undeclared else "usual",
            dtype=dtype,
        )
    ]
    return found if proof else [*found, _noise(f"{mean}in every element")]


def _noise(what: str) -> Diagnosis:
    return name_cause(
        "noise",
        f"{what} that no rank weights explain, and no result is representable in a lower precision",
    )


def _small_noise(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    """Name errors in most elements that are small relative to the sum and outside the span of the
    ranks' gradients.
    """
    largest = 0.0
    if all(p.elements < LEAST_FOR_A_GRID for p in parameters):
        return []
    for p in parameters:
        size = sum(share * norm for share, norm in zip(step.shares, p.norms, strict=True))
        for rank in p.wrong:
            error = combination_distance(p, rank, step.shares)
            if not error <= _MOST_NOISE * size:
                return []
            # Small parameters next to larger ones need only this.
            if p.elements >= LEAST_FOR_A_GRID and (
                2 * p.of_mean[rank] > p.elements or p.remainder[rank] < error / 2
            ):
                return []
            largest = max(largest, error / size)
    if not largest:
        return []
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    share = f"{largest:.1g} of the sum (as norms)"
    return [_noise(f"{where}: {step.mean}, up to errors of {share} in most elements")]
