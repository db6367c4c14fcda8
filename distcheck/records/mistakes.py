"""The simplest mistakes of a gradient exchange, and which of them a check would show. No torch.

What each leaves, and when a comparison shows it, is in `checks/sensitivity.py`; what follows
for the verdict is in `sensitivity.py`.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

SENSITIVITY = "sensitivity"  # the name of the check
_MOST_NAMED = 4


class Mistake(msgspec.Struct, frozen=True, kw_only=True):
    """`says` completes "would have shown ..."; `of_ranks`: each rank may make it, and is counted by
    itself; `of_exchange`: it is made with what one step exchanges of one tensor.
    """

    says: str
    of_ranks: bool = False
    of_exchange: bool = True


MISTAKES: Mapping[str, Mistake] = {
    "missing-sync": Mistake(says="a missing sync", of_ranks=True),
    "lost-rank": Mistake(says="a lost rank", of_ranks=True),
    "doubled-rank": Mistake(says="a rank that is added twice", of_ranks=True),
    "times-world": Mistake(says="a missing division"),
    "divided-by-world": Mistake(says="a second division"),
    "stale": Mistake(says="a gradient that is a step old", of_exchange=False),
    "other-parameter": Mistake(
        says="the gradient of another parameter of the same shape", of_exchange=False
    ),
}


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison of one tensor would have shown, over some steps.

    shown  mistake to the ranks for which it shows, `(0,)` for one that is not a single rank's; a
           mistake that could not be made (no step before, no other parameter) is not there
    scale  the smallest relative error of a factor that shows; "inf" where none does
    zero   every rank's gradient is zero, or absent, at every step
    absent, absent_on_some, zero_on_some  at some step no rank had a gradient; some ranks had none
           while others had one; some ranks' was zero while others' was not
    alike  every rank's gradient is the same, at every step
    steps  at how many steps a mistake in the exchange would have shown
    sizes  of the largest finite element after the exchange, where it is not zero: the smallest of
           all steps, and the largest; empty where there was none
    """

    shown: dict[str, tuple[int, ...]]
    scale: float | str
    zero: bool
    alike: bool
    steps: int
    absent: bool = False
    absent_on_some: bool = False
    zero_on_some: bool = False
    sizes: tuple[float, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether any mistake in the exchange would have shown."""
        return self.steps > 0


NOTHING = Shown(
    shown={name: () for name, mistake in MISTAKES.items() if mistake.of_exchange},
    scale="inf",
    zero=True,
    alike=True,
    steps=0,
    absent=True,
)


def range_of(sizes: Sequence[float]) -> tuple[float, ...]:
    """The smallest and the largest; nothing of nothing."""
    return (min(sizes), max(sizes)) if sizes else ()


def merge_shown(parts: Sequence[Mapping[str, Shown]]) -> dict[str, Shown]:
    """One by tensor out of those for disjoint sets of steps."""
    merged: dict[str, Shown] = {}
    for part in parts:
        for name, found in part.items():
            merged[name] = both(merged[name], found) if name in merged else found
    return merged


def both(one: Shown, two: Shown) -> Shown:
    """What a tensor shows over two disjoint sets of steps."""
    names = dict.fromkeys([*one.shown, *two.shown])
    return Shown(
        shown={
            name: tuple(sorted({*one.shown.get(name, ()), *two.shown.get(name, ())}))
            for name in names
        },
        scale=min(one.scale, two.scale, key=float),
        zero=one.zero and two.zero,
        alike=one.alike and two.alike,
        steps=one.steps + two.steps,
        absent=one.absent or two.absent,
        absent_on_some=one.absent_on_some or two.absent_on_some,
        zero_on_some=one.zero_on_some or two.zero_on_some,
        sizes=range_of([*one.sizes, *two.sizes]),
    )


def scales(shown: Mapping[str, Shown]) -> tuple[float, float] | None:
    """From which relative error on a wrong factor would have shown: in the most sensitive tensor,
    and in every tensor that could show a mistake. None where none could.
    """
    found = sorted(float(one.scale) for one in shown.values() if one.counts)
    return (found[0], found[-1]) if found else None


def shares(tensors: Sequence[Shown], ranks: int) -> Iterator[tuple[str, int, int]]:
    """By mistake: how many tensors would have shown it, on every one of the `ranks` with data, and
    in how many it could be made; those that could be made in none are left out.
    """
    for name, mistake in MISTAKES.items():
        possible = [one for one in tensors if name in one.shown]
        needed = ranks if mistake.of_ranks else 1
        if possible:
            yield name, sum(len(one.shown[name]) >= needed for one in possible), len(possible)


def describe(shown: Mapping[str, Shown], *, ranks: int) -> str:
    """How many tensors would have shown which mistakes, on every one of the `ranks` with data."""
    by_share: dict[str, list[str]] = {}
    for name, number, possible in shares([*shown.values()], ranks):
        share = f"{number:,}" if number else "none"
        if number == possible == len(shown):
            share = "all"
        elif possible < len(shown):
            share = f"{share} of {possible:,}"
        by_share.setdefault(share, []).append(MISTAKES[name].says)
    text = [
        f"{share}{' would have shown' * (number == 0)} {listed(says)}"
        for number, (share, says) in enumerate(by_share.items())
    ]
    silent = [name for name, one in shown.items() if not one.counts]
    if silent:
        zero = all(shown[name].zero for name in silent)
        more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
        text.append(
            f"{', '.join(silent[:_MOST_NAMED])}{more} could show no mistake"
            + (" (gradient zero on every rank)" if zero else "")
        )
    return f"of {len(shown):,} tensors, {'; '.join(text)}"


def listed(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"
