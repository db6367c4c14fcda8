"""What is expected at a step, for all that is planned, computed before any check is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcheck.judge.checks import sensitivity
from distcheck.judge.checks.evidence import Expectation
from distcheck.judge.oracles import expect
from distcheck.judge.oracles.forms import GradientForms
from distcheck.judge.oracles.references import References
from distcheck.recordings.traces.header import StepHeader
from distcheck.records.mistakes import Shown

Pair = tuple[str, str]  # a check and its layer


@dataclass(frozen=True)
class Expected:
    """What is expected at one step; where it could not be computed, why."""

    step: int
    headers: tuple[StepHeader, ...]
    what: Mapping[Pair, Any]
    shown: Mapping[str, tuple[Shown | None, ...]]
    errors: Mapping[Pair, Exception]

    def of(self, check: str, layer: str) -> Expectation:
        """For one check under one layer. Raises what kept it from being computed."""
        pair = (check, layer)
        if pair in self.errors:
            raise self.errors[pair]
        what = self.what[pair]
        shown = self.shown[layer] if isinstance(what, GradientForms) else ()
        return Expectation(step=self.step, headers=self.headers, what=what, shown=shown)


def expect_step(references: References, step: int, planned: Sequence[Pair]) -> Expected:
    """All that the planned checks need of a step, and no more."""
    at = references.at(step)
    headers = tuple(at.trace.header(rank, step) for rank in range(at.trace.layout.world))
    what: dict[Pair, Any] = {}
    errors: dict[Pair, Exception] = {}
    for pair in planned:
        try:
            what[pair] = expect(*pair, at)
        except Exception as error:
            errors[pair] = error
    shown: dict[str, tuple[Shown | None, ...]] = {}
    gradients = {
        layer: forms for (_, layer), forms in what.items() if isinstance(forms, GradientForms)
    }
    try:
        if references.mesh is None:
            shown = sensitivity.of_step(at.trace, step, gradients)
        else:  # a gradient there is no mean of parts that ranks have by themselves
            shown = dict.fromkeys(gradients, (None,) * len(at.specs))
    except Exception as error:
        errors |= {pair: error for pair, forms in what.items() if isinstance(forms, GradientForms)}
    return Expected(step, headers, what, shown, errors)
