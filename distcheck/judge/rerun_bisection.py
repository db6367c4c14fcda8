"""What to run when a rerun in separate interpreters was not as the first world: one world at a
time, until it is known what makes the difference, or that it is a matter of chance.

1  a repeat of the first world     differs: two worlds with one process state do
2  each factor alone               the first that differs is suspected; delays are no process state
3  the repeat and the suspect, twice   a race that showed by chance is the one or the other

Where no factor alone makes a difference, all of them but the delays are suspected together. A race
that shows in a world with probability p is mistaken for process state with a probability of at most
p^4 (1 - p)^5 for each of four factors, and p^3 (1 - p)^9 for all together: below 1 % at any p.
"""

from collections.abc import Generator

import msgspec

from distcheck.worlds.surroundings import TOGETHER, Surroundings

_CONFIRMED = 2
Differs = bool  # whether a world differed from the first, in bits or in how its ranks ended


class Separation(msgspec.Struct, frozen=True, kw_only=True):
    """What further worlds showed of a rerun in separate interpreters that was not the first world.

    `depends` says whether it depends on process state, and was not a matter of chance: on each of
    `factors` alone, or, where there are several, on no single one of them. Where it does not, one
    factor says that this one made the difference, as delays do to a race. `harmless`: the rerun
    passed every check too, and its factor is the machines that ranks are on. `lines` are those of
    the code under test that read such state, as text.
    """

    depends: bool
    factors: tuple[str, ...] = ()
    worlds: int
    harmless: bool = False
    lines: tuple[str, ...] = ()


class TakingApart:
    """Asks for worlds, and comes to a conclusion.

    `next` is the world to run, None when there is a `conclusion`; `note` takes how it was.
    """

    def __init__(self, separate: Surroundings) -> None:
        self._count = 0
        self._plan = _plan(separate)
        self.conclusion: Separation | None = None
        self.next: Surroundings | None = next(self._plan)

    def note(self, differs: Differs) -> None:
        """How the world was that `next` asked for."""
        self._count += 1
        try:
            self.next = self._plan.send(differs)
        except StopIteration as end:
            depends, factors = end.value
            self.next = None
            self.conclusion = Separation(depends=depends, factors=factors, worlds=self._count)


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
