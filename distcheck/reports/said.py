"""What a screen of failures has said, and what it says of a case's causes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from distcheck.records import CaseReport, CheckResult, Diagnosis
from distcheck.records.causes import APART
from distcheck.reports.failures import Key


@dataclass
class Said:
    """What a screen has said: failures and a strategy's causes, each with its world."""

    failures: dict[Key, int] = field(default_factory=dict)
    causes: dict[tuple[str, str, str], int] = field(default_factory=dict)
    cut: bool = False  # whether there is more of some line

    def parted(self, case: CaseReport) -> tuple[list[Diagnosis], list[Diagnosis]]:
        """A case's causes, each once: those that are new, and those that were said of its strategy.
        What nothing explains is new each time.
        """
        once = {one.cause: one for one in reversed(case.diagnosis)}
        new, old = list[Diagnosis](), list[Diagnosis]()
        for cause in dict.fromkeys(one.cause for one in case.diagnosis):
            was_said = cause != "unexplained" and self._key(case, cause) in self.causes
            (old if was_said else new).append(once[cause])
        return new, old

    def add(self, case: CaseReport, causes: Iterable[Diagnosis]) -> None:
        """These causes of a case were said. One of several of which the same is seen is news
        where it stands alone.
        """
        self.causes |= {
            self._key(case, one.cause): case.case.world
            for one in causes
            if APART not in one.evidence
        }

    def world_of(self, case: CaseReport, one: Diagnosis) -> int:
        """The world in which a cause was said first of this case's strategy."""
        return self.causes[self._key(case, one.cause)]

    def _key(self, case: CaseReport, cause: str) -> tuple[str, str, str]:
        return case.case.strategy, case.case.backend, cause


def by_evidence(
    causes: Sequence[Diagnosis], first: CheckResult | None
) -> dict[str, list[Diagnosis]]:
    """Causes of which the same is seen, together. That something differs `first` is said beside."""
    found: dict[str, list[Diagnosis]] = {}
    for one in causes:
        differs, _, rest = one.evidence.partition("; ")
        if rest and first is not None and differs.startswith(f"{first.check} differ first: "):
            one = msgspec.structs.replace(one, evidence=rest)
        seen, apart, _ = one.evidence.partition(f"; {APART} ")
        found.setdefault(seen if apart else one.evidence, []).append(one)
    return {alike[0].evidence if len(alike) == 1 else seen: alike for seen, alike in found.items()}
