"""Accumulates the comparisons of a check, and keeps the worst place and the first divergence."""

import math

from msgspec import structs

from distcheck.judge.checks.comparison import Comparison
from distcheck.judge.checks.merging import share_of_bound
from distcheck.records import CheckResult, Compared, Difference, FindingKind, number
from distcheck.records.mistakes import RevealedMistakes, merge_two_revealed_mistakes


def _share(place: Difference | None) -> float:
    share = math.inf if place is None else share_of_bound(place)
    if place is None or place.bound:
        return share
    return math.inf if share or place.actual_bits != place.expected_bits else 0.0


class _Counts:
    """Distinct tensors, ranks and steps, and the total number of elements."""

    def __init__(self) -> None:
        self.tensors: set[str] = set()
        self.ranks: set[int] = set()
        self.steps: set[int] = set()
        self.elements = 0

    def add(self, parameter: str, rank: int, step: int, elements: int) -> None:
        if parameter:
            self.tensors.add(parameter)
        self.ranks.add(rank)
        self.steps.add(step)
        self.elements += elements

    def compared(self, *, besides: "_Counts | None" = None) -> Compared:
        """Return the counts; of tensors, ranks and steps only those not in `besides`."""
        other = besides or _Counts()
        return Compared(
            tensors=len(self.tensors - other.tensors),
            elements=self.elements,
            ranks=len(self.ranks - other.ranks),
            steps=len(self.steps - other.steps),
        )


class Tally:
    """The running result of one check under one layer."""

    def __init__(self, check: str, layer: str) -> None:
        self.check = check
        self.layer = layer
        self._counts, self._insensitive_counts = _Counts(), _Counts()
        self._shown: dict[str, RevealedMistakes] = {}
        self._insensitive: set[tuple[str, int]] = set()
        self._failed = False
        self._worst: Difference | None = None
        self._first: Difference | None = None
        self._reasons: list[str] = []
        self._kinds: dict[FindingKind, None] = {}
        self._excuses: list[str] = []
        self._missing = False
        self._shares: dict[str, dict[int, float]] = {}
        self._in_bits = True

    def record_revealed(self, found: RevealedMistakes, *, parameter: str, step: int) -> None:
        """Record, before a tensor is compared, the mistakes that the comparison would reveal."""
        before = self._shown.get(parameter)
        self._shown[parameter] = (
            found if before is None else merge_two_revealed_mistakes(before, found)
        )
        if not found.counts:
            self._insensitive.add((parameter, step))

    def record_may_differ(self, parameter: str, step: int, *, can: bool) -> None:
        """Record, before a tensor is compared, if it can differ between ranks."""
        (self._insensitive.discard if can else self._insensitive.add)((parameter, step))

    def add(self, comparison: Comparison, *, parameter: str, rank: int, step: int) -> None:
        """Add the comparison of one tensor of one rank at one step. An undecided comparison is not
        counted, and makes the check unknown.
        """
        if comparison.undecided:
            self.missing(comparison.undecided)
            return
        if not comparison.ok:
            self._insensitive.discard((parameter, step))
        self.count(parameter=parameter, rank=rank, step=step, elements=comparison.elements)
        worst = comparison.worst
        share = 0.0 if worst is None and comparison.ok else _share(worst)
        wrong = not comparison.ok and share <= 1  # bits that differ while numbers are equal
        self._keep_share(parameter, step, math.inf if wrong else share)
        if worst is not None:
            self._in_bits = self._in_bits and float(worst.bound) <= 0
            self._keep_worst(structs.replace(worst, parameter=parameter, rank=rank, step=step))
        if comparison.first is not None:
            self._failed = True
            self._first = self._first or structs.replace(
                comparison.first, parameter=parameter, rank=rank, step=step
            )

    def count(self, *, parameter: str, rank: int, step: int, elements: int) -> None:
        """Count a comparison; separately if it cannot reveal any mistake."""
        counts = (
            self._insensitive_counts if (parameter, step) in self._insensitive else self._counts
        )
        counts.add(parameter, rank, step, elements)

    def fail(
        self,
        reason: str,
        *,
        parameter: str = "",
        rank: int = 0,
        step: int = 0,
        actual: float | str = "",
        expected: float | str = "",
        kind: FindingKind = FindingKind.OTHER,
    ) -> None:
        """Record a failure that is not numerical: something missing or misplaced."""
        self._failed = True
        self.remark(reason, kind)
        self._keep_share(parameter, step, math.inf)
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
        self._first = self._first or difference
        self._keep_worst(difference)

    def _keep_worst(self, difference: Difference) -> None:
        if self._worst is None or share_of_bound(difference) > share_of_bound(self._worst):
            self._worst = difference

    def _keep_share(self, parameter: str, step: int, share: float) -> None:
        row = self._shares.setdefault(parameter, {})
        row[step] = max(row.get(step, 0.0), share)

    def remark(self, reason: str, kind: FindingKind = FindingKind.OTHER) -> None:
        """Add a sentence to the report. The verdict does not change."""
        self._reasons.append(reason)
        self._kinds[kind] = None

    def missing(self, reason: str, kind: FindingKind = FindingKind.OTHER) -> None:
        """Record that something could not be judged. The check becomes unknown, unless it fails."""
        self._missing = True
        self.remark(reason, kind)

    def excuse(self, reason: str) -> None:
        """Add a reason that something passed. It is omitted if the check fails."""
        self._excuses.append(reason)

    def result(self) -> CheckResult:
        return CheckResult(
            check=self.check,
            layer=self.layer,
            verdict="fail" if self._failed else "unknown" if self._missing else "pass",
            compared=self._counts.compared(),
            insensitive=self._insensitive_counts.compared(besides=self._counts),
            shown=self._shown,
            worst=self._worst,
            first=self._first,
            reason="; ".join(dict.fromkeys(self._reasons)),
            lead=self._reasons[0] if len(self._reasons) > 1 else "",
            kinds=tuple(self._kinds),
            excuse="; ".join(dict.fromkeys(self._excuses)),
            shares={
                name: {step: number(share) for step, share in row.items()}
                for name, row in self._shares.items()
            },
            in_bits=self._in_bits,
        )
