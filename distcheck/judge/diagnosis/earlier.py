"""Causes that show in what earlier steps left: a gradient that is stale, or added to."""

from collections.abc import Sequence

from distcheck.judge.diagnosis.facts import ParameterFacts, StepFacts
from distcheck.judge.diagnosis.wording import parameters_text
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause


def explain(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    """Every cause that explains these parameters on all ranks."""
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    found = [
        name_cause(
            "stale-gradient", f"{where}: ranks hold the mean over all samples of step {past}"
        )
        for past in range(step.step)
        if _all_match(step, parameters, "earlier", past)
    ]
    for past in range(step.step):
        kinds = [k for k in ("sum", "added") if _all_match(step, parameters, k, past)]
        if kinds:
            what = (
                f"the means of steps {past} to {step.step} added up"
                if kinds[0] == "sum"
                else f"this step's mean, added to what they held at step {past}"
            )
            found.append(name_cause("accumulated-gradient", f"{where}: ranks hold {what}"))
            break
    return found


def _all_match(step: StepFacts, parameters: Sequence[ParameterFacts], kind: str, past: int) -> bool:
    found = {(m.parameter, m.rank) for m in step.matches if m.kind == kind and m.step == past}
    return all((p.name, rank) in found for p in parameters for rank in p.wrong)
