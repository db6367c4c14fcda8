"""Causes that show in the numbers themselves: roundings of a shorter dtype."""

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

_MOST_NOISE = 1e-2  # Chosen, of what is added up: more is another gradient
_WIDTHS = ("float32", "float16", "bfloat16")  # by what they round away


def _stand_alone(step: StepFacts, parameters: Sequence[ParameterFacts]) -> bool:
    """Beside longer parameters that are wrong in another way, the size of errors says nothing; nor
    does that of a few elements beside any. Of a few others the errors may be small by chance.
    """
    own = {parameter.name for parameter in parameters}
    others = [parameter for parameter in step.parameters if parameter.name not in own]
    if all(p.elements < LEAST_FOR_A_GRID for p in parameters):
        return not others
    in_another_way = [p for p in others if not all(p.shorter[rank] for rank in p.wrong)]
    return all(p.elements < LEAST_FOR_A_GRID for p in in_another_way)


def rounded_to(facts: Measurements) -> str:
    """The short dtype whose numbers all wrong gradients are, where that is one and the same in
    every step that was looked at; empty where it is not. Of tensors of a few elements every number
    could be one by chance: they do not count.
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
    # Short parameters count if there are enough of them, and no long one.
    enough = sum(p.elements for p in parameters) >= LEAST_FOR_A_GRID
    counting = [p for p in parameters if p.elements >= LEAST_FOR_A_GRID] or parameters
    # No weights of the shards' gradients explain roundings, and only they leave a grid in all.
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
    """Errors in most elements, small beside what is added up, and in no direction of the ranks'
    gradients.
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
            # Of a few elements beside longer parameters, that is all that is asked.
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
