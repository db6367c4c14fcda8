"""Causes that show in which elements are right, and in whose gradient a parameter got."""

from collections.abc import Sequence

from distcheck.diagnosis.facts import Match, ParameterFacts, StepFacts
from distcheck.diagnosis.findings import Finding, parameters_text, positions_text


def explain(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Finding]:
    """Every cause that explains these parameters on all ranks."""
    return [*_partial(step, parameters), *_order(step, parameters)]


def _partial(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Finding]:
    """Elements are the mean or the rank's own, and both are there (maybe in other parameters)."""
    own = mean = elements = 0
    for parameter in parameters:
        for rank in parameter.wrong:
            if parameter.of_either[rank] < parameter.elements:
                return []
            # An element may be both, a zero for example; it says nothing then.
            own += parameter.elements - parameter.of_mean[rank]
            mean += parameter.elements - parameter.of_own[rank]
            elements += parameter.elements
    if not own or (not mean and len(parameters) == step.total):
        return []
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    if mean:
        what = f"{own:,} of {elements:,} elements (over all ranks) are the rank's own, the others "
        what += "the mean over all samples"
    else:
        what = "ranks hold their own gradients there, and not in the other parameters"
    return [
        Finding(
            "partial-sync",
            f"{where}: {what}",
            "look at what selects the parameters, slices or chunks to exchange: a remainder, a "
            "first few rows, a layout that makes a copy, a parameter that is not in the list",
        )
    ]


def _order(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Finding]:
    others = [m for m in step.matches if m.kind == "parameter"]
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    suggestion = (
        "exchange and put back parameters in one order on every rank: the same list both times, "
        "with names to go by"
    )
    if _all_match(parameters, others):
        names = {p.name for p in parameters}
        pairs = {m.parameter: m.other for m in others if m.parameter in names}
        shown = ", ".join(f"{name} that of {other}" for name, other in list(pairs.items())[:4])
        return [Finding("wrong-parameter-order", f"{where}: got {shown}", suggestion)]
    mixed = [m for m in step.matches if m.kind in ("parameter", "mixed")]
    if _all_match(parameters, mixed):
        first = next(m for m in mixed if m.ranks)
        what = (
            f"in what {positions_text(step, [first.rank])} holds as {first.parameter}, "
            f"{positions_text(step, first.ranks)} gave "
            f"{'its' if len(first.ranks) == 1 else 'their'} gradient of {first.other}"
        )
        return [Finding("wrong-parameter-order", f"{where}: {what}", suggestion)]
    permuted = [m for m in step.matches if m.kind == "permuted"]
    if len(parameters) == len(step.parameters) and _all_match(parameters, permuted):
        what = "the elements are those of the mean over all samples, and stand in other places"
        return [Finding("wrong-parameter-order", f"{where}: {what}", suggestion)]
    return []


def _all_match(parameters: Sequence[ParameterFacts], matches: Sequence[Match]) -> bool:
    found = {(match.parameter, match.rank) for match in matches}
    return all((p.name, rank) in found for p in parameters for rank in p.wrong)
