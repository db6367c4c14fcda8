"""The wording that families of causes share."""

from collections.abc import Mapping, Sequence

from distcheck.judge.diagnosis.measurements import Fit, ParameterFacts, StepFacts
from distcheck.records import CheckResult
from distcheck.records.odd_ranks import ranks_in_words

Failures = Mapping[tuple[str, str], CheckResult]  # by (check, layer)


def where(result: CheckResult) -> str:
    """Step, tensor and rank of the first divergence; the check's own words where it has none."""
    place = result.first or result.worst
    return result.reason if place is None else place.place


def positions_text(step: StepFacts, positions: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`, of ranks as a step's facts number them: for whatever names those."""
    return ranks_in_words([step.number(position) for position in positions])


def some_of(names: Sequence[str], most: int = 6) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def parameters_text(step: StepFacts, parameters: Sequence[ParameterFacts]) -> str:
    """`all 6 parameters`, or their names; of those, that could show a missing exchange."""
    if len(parameters) == step.total:
        which = f" that could show it ({step.silent} could not)" if step.silent else ""
        what = f"all {step.total} parameters" if step.total > 1 else "the only parameter"
        return what + which
    names = [parameter.name for parameter in parameters]
    return f"{some_of(names, 3)} ({len(names)} of {step.total} parameters)"


def number_text(value: float, *, beside: Sequence[float] = (1.0,)) -> str:
    """Seven digits, which is what float32 has; more where a number would read as one of those that
    it stands `beside`, and is not that.
    """
    for digits in range(7, 17):
        text = f"{value:.{digits}g}"
        if not any(text == f"{other:.{digits}g}" and value != other for other in beside):
            return text
    return f"{value:.17g}"


def coefficients_text(step: StepFacts, fits: Sequence[Fit], rank: int) -> str:
    """What each rank's gradient counts for in one rank's result, beside what it should."""
    got = ", ".join(f"{c:.4g}" for c in fits[rank].coefficients)
    required = ", ".join(f"{share:.4g}" for share in step.shares)
    whose = positions_text(step, [rank])
    return f"in {whose}'s result the ranks' gradients have weights {got} (expected: {required})"
