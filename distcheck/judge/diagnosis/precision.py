"""Causes that show in the values themselves: roundings of a lower-precision dtype."""

from collections.abc import Sequence

from distcheck.judge.diagnosis.combinations import bound, distance
from distcheck.judge.diagnosis.measurements import (
    LEAST_FOR_A_GRID,
    Measurements,
    ParameterFacts,
    StepFacts,
)
from distcheck.judge.diagnosis.wording import parameters_text
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause

_MOST_NOISE = 1e-2  # Heuristic, relative to the sum: larger errors are another gradient
_WIDTHS = ("float32", "float16", "bfloat16")  # by increasing rounding error


def _stand_alone(step: StepFacts, parameters: Sequence[ParameterFacts]) -> bool:
    """Return True if the size of errors is conclusive: no larger parameters are wrong in another
    way, and not all have few elements next to others.
    """
    own = {parameter.name for parameter in parameters}
    others = [parameter for parameter in step.parameters if parameter.name not in own]
    if all(p.elements < LEAST_FOR_A_GRID for p in parameters):
        return not others
    in_another_way = [p for p in others if not all(p.shorter[rank] for rank in p.wrong)]
    return all(p.elements < LEAST_FOR_A_GRID for p in in_another_way)


def rounded_to(facts: Measurements) -> str:
    """Return the low-precision dtype in which all wrong gradients are representable, at every
    measured step, or "". Tensors of a few elements are ignored: they may be so by chance.
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


def explain(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    dtypes = {p.shorter[rank] for p in parameters for rank in p.wrong}
    if not dtypes or "" in dtypes:
        return _small_noise(step, parameters)
    # Small parameters count if they have enough elements together, and none is large.
    enough = sum(p.elements for p in parameters) >= LEAST_FOR_A_GRID
    counting = [p for p in parameters if p.elements >= LEAST_FOR_A_GRID] or parameters
    # Weights of gradients cannot explain roundings, and only rounding leaves all on a grid.
    grid = enough and all(p.on_grid[rank] for p in counting for rank in p.wrong)
    beyond = any(
        p.remainder[rank] > bound(step, p, step.shares) for p in parameters for rank in p.wrong
    )
    if not grid and not (beyond and _stand_alone(step, parameters)):
        return []
    dtype = max(dtypes, key=_WIDTHS.index)
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    mean = f"{where}: the mean over all samples, up to errors "
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
            error = distance(p, rank, step.shares)
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
    return [_noise(f"{where}: the mean over all samples, up to errors of {share} in most elements")]
