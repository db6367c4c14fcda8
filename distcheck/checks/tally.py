"""Adds up what a check compared, and keeps the worst place and the first divergence."""

from distcheck.checks.comparison import Comparison, Place
from distcheck.checks.merging import share_of_bound
from distcheck.checks.sums import Sums
from distcheck.records import CheckResult, Compared, Difference, number


class Tally:
    """The running result of one check under one layer."""

    def __init__(self, check: str, layer: str) -> None:
        self.check = check
        self.layer = layer
        self._tensors: set[str] = set()
        self._ranks: set[int] = set()
        self._steps: set[int] = set()
        self._elements = 0
        self._failed = False
        self._worst: Difference | None = None
        self._first: Difference | None = None
        self._reasons: list[str] = []
        self.sums = Sums()

    def add(self, comparison: Comparison, *, parameter: str, rank: int, step: int) -> None:
        """Takes in the comparison of one tensor of one rank at one step."""
        self.count(parameter=parameter, rank=rank, step=step, elements=comparison.elements)
        self.sums.add(comparison, parameter=parameter, rank=rank, step=step)
        if comparison.worst is not None:
            self._note(_difference(comparison.worst, parameter, rank, step))
        if not comparison.ok:
            self._failed = True
            place = comparison.first or comparison.worst
            if place is not None and self._first is None:
                self._first = _difference(place, parameter, rank, step)

    def count(self, *, parameter: str, rank: int, step: int, elements: int) -> None:
        """Notes that something was compared."""
        if parameter:
            self._tensors.add(parameter)
        self._ranks.add(rank)
        self._steps.add(step)
        self._elements += elements

    def fail(
        self,
        reason: str,
        *,
        parameter: str = "",
        rank: int = 0,
        step: int = 0,
        actual: float | str = "",
        expected: float | str = "",
    ) -> None:
        """Notes a mismatch that is not one of numbers: something missing, or out of place."""
        self._failed = True
        self._reasons.append(reason)
        self.sums.fail(parameter=parameter, step=step)
        difference = Difference(
            parameter=parameter,
            rank=rank,
            step=step,
            index=(),
            actual=actual,
            expected=expected,
            error="inf",
            bound=0.0,
            unit="",
        )
        if self._first is None:
            self._first = difference
        self._note(difference)

    def _note(self, difference: Difference) -> None:
        if self._worst is None or share_of_bound(difference) > share_of_bound(self._worst):
            self._worst = difference

    def remark(self, reason: str) -> None:
        """Adds a sentence to the report that decides nothing."""
        self._reasons.append(reason)

    def result(self) -> CheckResult:
        """The result so far."""
        return CheckResult(
            check=self.check,
            layer=self.layer,
            verdict="fail" if self._failed else "pass",
            compared=Compared(
                tensors=len(self._tensors),
                elements=self._elements,
                ranks=len(self._ranks),
                steps=len(self._steps),
            ),
            worst=self._worst,
            first=self._first,
            reason="; ".join(dict.fromkeys(self._reasons)),
            aggregates=self.sums.result(),
        )


def _difference(place: Place, parameter: str, rank: int, step: int) -> Difference:
    return Difference(
        parameter=parameter,
        rank=rank,
        step=step,
        index=place.index,
        actual=number(place.actual),
        expected=number(place.expected),
        error=number(place.error),
        bound=number(place.bound),
        ulp=place.ulp,
        unit=place.unit,
        actual_bits=place.actual_bits,
        expected_bits=place.expected_bits,
    )
