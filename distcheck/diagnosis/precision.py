"""Causes that show in the numbers themselves: roundings of a shorter dtype."""

from collections.abc import Sequence

from distcheck.diagnosis.combinations import bound
from distcheck.diagnosis.facts import LEAST_FOR_A_GRID, ParameterFacts, StepFacts
from distcheck.diagnosis.findings import Finding, parameters_text

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


def explain(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Finding]:
    """Every cause that explains these parameters on all ranks."""
    dtypes = {p.shorter[rank] for p in parameters for rank in p.wrong}
    if not dtypes or "" in dtypes:
        return []
    # No weights of the shards' gradients explain roundings, and only they leave a grid.
    if not any(
        p.on_grid[rank] or p.remainder[rank] > bound(step, p, step.shares)
        for p in parameters
        for rank in p.wrong
    ):
        return []
    long = [p for p in parameters if p.elements >= LEAST_FOR_A_GRID]
    grid = bool(long) and all(p.on_grid[rank] for p in long for rank in p.wrong)
    if not grid and not _stand_alone(step, parameters):
        return []
    dtype = max(dtypes, key=_WIDTHS.index)
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    return [
        Finding(
            "low-precision",
            f"{where}: the mean over all samples, up to errors as large as {dtype} makes when "
            "gradients are rounded to it, and larger than their own dtype makes"
            + (f"; every result is a number of {dtype} (or a W-th of one)" if grid else ""),
            f"exchange gradients in their own dtype; or, if {dtype} is meant, promise it with "
            f'@strategy(wire="{dtype}"), or say --accept low-precision:{dtype}',
        )
    ]
