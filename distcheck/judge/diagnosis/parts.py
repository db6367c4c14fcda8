"""Causes that show in which elements are right, and in whose gradient a parameter got."""

from collections.abc import Sequence

from distcheck.judge.diagnosis.facts import Match, ParameterFacts, StepFacts
from distcheck.judge.diagnosis.findings import Finding, parameters_text, positions_text

_LEAST_OF_A_KIND = 4  # elements over all ranks: of fewer, all may be such by chance


def explain(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Finding]:
    """Every cause that explains these parameters on all ranks."""
    found = _partial(step, parameters)
    return [*(found or _other_kinds(step, parameters)), *_order(step, parameters)]


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


_KINDS = {
    "zero": (
        "partial-sync",
        "zero",
        "look at what fills the buffer that is exchanged, and at what is copied back from it",
    ),
    "own / W": (
        "partial-sync",
        "a W-th of the rank's own gradient",
        "these were divided and never exchanged: look at what selects the slices or chunks to "
        "exchange",
    ),
    "sum": (
        "missing-division",
        "the sum over all ranks, not divided",
        "divide everything that was added up, once: look at what selects the elements to divide",
    ),
    "any rank's": (
        "one-rank-only",
        "some one rank's own gradient, or its share of the mean",
        "look at the chunk that each rank adds up and passes on, and at the round at which it "
        "stops: chunks that are one rank's alone were passed on before they were added to",
    ),
}


def _other_kinds(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Finding]:
    """Elements are the mean or of one other kind, and both are there, or other parameters are
    right; chunks of single ranks may be all that there is.
    """
    found = []
    for kind, (cause, what, suggestion) in _KINDS.items():
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
                rest = ", the others the mean over all samples" if mean else ""
                evidence = f"{where}: {other:,} of {elements:,} elements (over all ranks) are "
                found.append(Finding(cause, f"{evidence}{what}{rest}", suggestion))
    return found[:1]


def _are_parts(step: StepFacts, kind: str, mean: int) -> bool:
    """Whether there is something else beside the elements of a kind."""
    if kind == "any rank's":
        return True
    if kind != "zero":
        return mean > 0
    whole = step.parameters
    something = any(any(p.projected[r]) or p.remainder[r] for p in whole for r in p.wrong)
    return something or len(whole) < step.total


_SHARED = (
    "look for a buffer that several parameters share: it is filled again before its exchange has "
    "ended, or before it was copied back; give each its own, or wait in between"
)


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
        wrong = {p.name for p in step.parameters}
        if len(set(pairs.values())) < len(pairs) or not set(pairs.values()) <= wrong:
            what = f"{shown}, which {'that one' if len(pairs) == 1 else 'another'} holds as well"
            return [Finding("shared-bucket", f"{where}: got {what}", _SHARED)]
        return [Finding("wrong-parameter-order", f"{where}: got {shown}", suggestion)]
    mixed = [m for m in step.matches if m.kind in ("parameter", "mixed")]
    if _all_match(parameters, mixed):
        first = next(m for m in mixed if m.ranks)
        what = (
            f"in what {positions_text(step, [first.rank])} holds as {first.parameter}, "
            f"{positions_text(step, first.ranks)} gave "
            f"{'its' if len(first.ranks) == 1 else 'their'} gradient of {first.other}"
        )
        if first.other not in {p.name for p in step.parameters}:
            what += ", which is right itself"
            return [Finding("shared-bucket", f"{where}: {what}", _SHARED)]
        return [Finding("wrong-parameter-order", f"{where}: {what}", suggestion)]
    permuted = [m for m in step.matches if m.kind == "permuted"]
    if len(parameters) == len(step.parameters) and _all_match(parameters, permuted):
        what = "the elements are those of the mean over all samples, and stand in other places"
        return [Finding("wrong-parameter-order", f"{where}: {what}", suggestion)]
    return []


def _all_match(parameters: Sequence[ParameterFacts], matches: Sequence[Match]) -> bool:
    found = {(match.parameter, match.rank) for match in matches}
    return all((p.name, rank) in found for p in parameters for rank in p.wrong)
