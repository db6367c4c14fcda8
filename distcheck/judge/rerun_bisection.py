"""Plans worlds, one at a time, that find the difference which changes a rerun in separate
interpreters, or show that it is a race.

    1  repeat the first world      if it differs, process state is not the reason
    2  each factor separately      the first that differs is suspected; delays are not state
    3  repeat and suspect, twice   a race would differ in one or the other

If no single factor makes a difference, all factors but the delays are suspected together. A race
that appears in a world with probability p is mistaken for process state with a probability of at
most p^4 (1 - p)^5 for each of four factors, and p^3 (1 - p)^9 for all together: below 1 % at any p.
"""

from collections.abc import Generator

import msgspec

from distcheck.worlds.surroundings import TOGETHER, Surroundings

_CONFIRMED = 2
Differs = bool  # True if a world differed from the first, in bits or exit status


class BisectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of further worlds about a rerun in separate interpreters that differed.

    depends   True if the difference depends on process state and is not a race: on each of
              `factors` separately, or on their combination if there are several
    factors   factors that make the difference; if `depends` is False, as delays do to a race
    harmless  True if the rerun passed every check as well, and its factor is the ranks' machines
    lines     lines of the code under test that read such state, as text
    """

    depends: bool
    factors: tuple[str, ...] = ()
    worlds: int
    harmless: bool = False
    lines: tuple[str, ...] = ()


class RerunBisection:
    """Requests worlds (`next`) until there is a `conclusion`; `note` takes each result."""

    def __init__(self, separate: Surroundings) -> None:
        self._count = 0
        self._plan = _plan(separate)
        self.conclusion: BisectionResult | None = None
        self.next: Surroundings | None = next(self._plan)

    def note(self, differs: Differs) -> None:
        """Record the result of the world `next`."""
        self._count += 1
        try:
            self.next = self._plan.send(differs)
        except StopIteration as end:
            depends, factors = end.value
            self.next = None
            self.conclusion = BisectionResult(depends=depends, factors=factors, worlds=self._count)


def _plan(separate: Surroundings) -> Generator[Surroundings, Differs, tuple[bool, tuple[str, ...]]]:
    if (yield TOGETHER):
        return False, ()
    lasting = tuple(factor for factor in separate.factors if factor != "delays")
    suspect = Surroundings(lasting, separate.seed)
    for factor in separate.factors:
        alone = Surroundings((factor,), separate.seed)
        if (yield alone):
            suspect = alone
            break
    if suspect.factors == ("delays",):
        return False, suspect.factors
    for _ in range(_CONFIRMED):
        if (yield TOGETHER) or not (yield suspect):
            return False, ()
    return True, suspect.factors
