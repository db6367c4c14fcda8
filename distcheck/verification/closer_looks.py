"""Which failed cases are looked at: one of those that fail in the same way.

A closer look costs as much as a case. Once one case of a strategy is explained, another in which
the same check fails first, at the same step, is taken for the same failure, and its report says so.
While one is looked at, the others wait for what that shows.
"""

from collections.abc import Iterator

from distcheck.judge import diagnosis
from distcheck.judge.checks.merging import earliest_failure
from distcheck.verification.case_run import CaseRun


class CloserLooks:
    """The looks of a session."""

    def __init__(self) -> None:
        self._looking: dict[object, CaseRun] = {}  # by code
        self._waiting: list[CaseRun] = []
        self._explained: list[CaseRun] = []

    def explained(self, run: CaseRun) -> bool:
        """Whether a case fails as one that is explained, which becomes its `like`."""
        alike = (r for r in self._explained if (_code(r), _way(r)) == (_code(run), _way(run)))
        run.like = next(alike, None)
        return run.like is not None

    def waits(self, run: CaseRun) -> bool:
        """Whether a case waits, as another of its code is looked at; if not, it is looked at."""
        if self._looking.setdefault(_code(run), run) is run:
            return False
        self._waiting.append(run)
        return True

    def taken_up(self, run: CaseRun) -> Iterator[CaseRun]:
        """Takes a case that was looked at; the cases that waited for it."""
        self._looking.pop(_code(run), None)
        found = diagnosis.diagnose((), run.results, run.seen, accept=run.case.accept)
        if all(one.cause != "unexplained" for one in found):
            self._explained.append(run)
        freed = [other for other in self._waiting if _code(other) == _code(run)]
        self._waiting = [other for other in self._waiting if other not in freed]
        yield from freed


def _code(run: CaseRun) -> object:
    """What cases share that may fail for one reason: the code, how it is called, its world."""
    return run.case.siblings, run.case.adaptation, run.case.loss, run.case.accept


def _way(run: CaseRun) -> object:
    """How a case fails: which check first, at which step, and whether replicas differ."""
    failed = [r for r in run.results if r.verdict == "fail" and r.check not in ("rerun", "outcome")]
    first = earliest_failure(failed)
    at = None if first is None or first.first is None else (first.check, first.first.step)
    return at, any(r.check == "agreement" for r in failed)
