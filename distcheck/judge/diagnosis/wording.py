"""Wording shared by families of causes."""

from collections.abc import Mapping, Sequence

from distcheck.judge.diagnosis.measurements import GradientFit, ParameterFacts, StepFacts
from distcheck.records import CheckResult, quoted
from distcheck.records.odd_ranks import ranks_in_words

Failures = Mapping[tuple[str, str], CheckResult]  # by (check, layer)


def place_of_divergence(result: CheckResult) -> str:
    """Return step, tensor and rank of the first divergence, or the reason of the check."""
    place = result.first or result.worst
    return result.reason if place is None else place.place


def positions_text(step: StepFacts, positions: Sequence[int]) -> str:
    """Format positions as `rank 1` or `ranks 0, 2`, with the ranks' numbers in the world."""
    return ranks_in_words([step.number(position) for position in positions])


def first_names_text(names: Sequence[str], most: int = 6) -> str:
    """Format the first names and the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(quoted, names[:most])) + more


def parameters_text(step: StepFacts, parameters: Sequence[ParameterFacts]) -> str:
    """Format `all 6 parameters`, or names; only those that can reveal a missing all-reduce."""
    if len(parameters) == step.total:
        which = f" that could show it ({step.silent} could not)" if step.silent else ""
        what = f"all {step.total} parameters" if step.total > 1 else "the only parameter"
        return what + which
    names = [parameter.name for parameter in parameters]
    several = "s" * (len(names) > 1)
    return f"parameter{several} {first_names_text(names, 3)} ({len(names)} of {step.total})"


def number_text(value: float, *, beside: Sequence[float] = (1.0,)) -> str:
    """Format a number with seven digits, float32's precision. Use more digits if the text would
    otherwise equal that of a different number in `beside`.
    """
    for digits in range(7, 17):
        text = f"{value:.{digits}g}"
        if not any(text == f"{other:.{digits}g}" and value != other for other in beside):
            return text
    return f"{value:.17g}"


def coefficients_text(step: StepFacts, fits: Sequence[GradientFit], rank: int) -> str:
    """Format the weights of the ranks' gradients in one rank's result, and the expected weights."""
    got = ", ".join(f"{c:.4g}" for c in fits[rank].coefficients)
    required = ", ".join(f"{share:.4g}" for share in step.shares)
    whose = positions_text(step, [rank])
    return f"in {whose}'s result the ranks' gradients have weights {got} (expected: {required})"
