"""The simplest mistakes of gradient synchronization, as a measure of a check's sensitivity. Does
not import torch.

`checks/sensitivity.py` computes the effect of each mistake and if a comparison reveals it;
`sensitivity.py` derives the verdict.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from distcheck.records.decoding import Count

SENSITIVITY = "sensitivity"  # the name of the check
_MOST_NAMED = 4


class Mistake(msgspec.Struct, frozen=True, kw_only=True):
    """A simple mistake.

    says         completes the sentence "would have shown ..."
    of_ranks     True if each rank may make it; ranks are then counted separately
    of_exchange  True if it concerns the communication of one tensor in one step
    """

    says: str
    of_ranks: bool = False
    of_exchange: bool = True


MISTAKES: Mapping[str, Mistake] = {
    "missing-sync": Mistake(says="a missing sync", of_ranks=True),
    "lost-rank": Mistake(says="a dropped rank", of_ranks=True),
    "doubled-rank": Mistake(says="a duplicated rank", of_ranks=True),
    "times-world": Mistake(says="a missing division"),
    "divided-by-world": Mistake(says="a second division"),
    "stale": Mistake(says="a gradient from the previous step", of_exchange=False),
    "other-parameter": Mistake(
        says="the gradient of another parameter of the same shape", of_exchange=False
    ),
}


class RevealedMistakes(msgspec.Struct, frozen=True, kw_only=True):
    """Mistakes that the comparison of one tensor would have revealed, over some steps.

    shown    ranks for which each mistake is revealed, `(0,)` if it concerns no single rank;
             impossible mistakes are missing (no previous step, no second parameter)
    scale    the smallest relative error of a factor that is revealed; "inf" if none is
    zero     True if every rank's gradient is zero, or absent, at every step
    absent   True if at some step no rank had a gradient
    absent_on_some  True if at some step only some ranks had a gradient
    zero_on_some    True if at some step only some ranks' gradients were zero
    `alike`  True if every rank's gradient is the same, at every step
    steps    number of steps at which a mistake in synchronization would have been revealed
    sizes    range over all steps of the largest finite nonzero element after synchronization;
             empty if there was none
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
        """Return True if any mistake in synchronization would have been revealed."""
        return self.steps > 0


class MistakeCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tensors that would have revealed a mistake, and the others' names."""

    tensors: Count
    of: Count
    not_in: tuple[str, ...]


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """The simplest mistakes that would have been revealed, for a document."""

    mistakes: dict[str, MistakeCount]
    wrong_factor: dict[str, float | str]
    no_mistake_shows_in: tuple[str, ...]


NOTHING = RevealedMistakes(
    shown={name: () for name, mistake in MISTAKES.items() if mistake.of_exchange},
    scale="inf",
    zero=True,
    alike=True,
    steps=0,
    absent=True,
)


def range_of_sizes(sizes: Sequence[float]) -> tuple[float, ...]:
    """Return the smallest and the largest of the sizes, or an empty tuple."""
    return (min(sizes), max(sizes)) if sizes else ()


def merge_revealed_mistakes(
    parts: Sequence[Mapping[str, RevealedMistakes]],
) -> dict[str, RevealedMistakes]:
    """Merge results for disjoint sets of steps; keys are tensors."""
    merged: dict[str, RevealedMistakes] = {}
    for part in parts:
        for name, found in part.items():
            merged[name] = (
                merge_two_revealed_mistakes(merged[name], found) if name in merged else found
            )
    return merged


def merge_two_revealed_mistakes(one: RevealedMistakes, two: RevealedMistakes) -> RevealedMistakes:
    """Merge a tensor's results over two disjoint sets of steps."""
    names = dict.fromkeys([*one.shown, *two.shown])
    return RevealedMistakes(
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
        sizes=range_of_sizes([*one.sizes, *two.sizes]),
    )


def smallest_revealed_scale_errors(
    shown: Mapping[str, RevealedMistakes],
) -> tuple[float, float] | None:
    """Return the smallest relative error of a factor that would have been revealed: in the most
    sensitive tensor, and in every tensor that could reveal a mistake. None if no tensor could.
    """
    found = sorted(float(one.scale) for one in shown.values() if one.counts)
    return (found[0], found[-1]) if found else None


def count_revealing_tensors(
    tensors: Sequence[RevealedMistakes], ranks: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (mistake, number of tensors that would have revealed it on all `ranks` with data,
    number of tensors in which it was possible). Impossible mistakes are omitted.
    """
    for name, mistake in MISTAKES.items():
        possible = [one for one in tensors if name in one.shown]
        needed = ranks if mistake.of_ranks else 1
        if possible:
            yield name, sum(len(one.shown[name]) >= needed for one in possible), len(possible)


def describe_revealed_mistakes(shown: Mapping[str, RevealedMistakes], *, ranks: int) -> str:
    """Describe the number of tensors that would have revealed each mistake on all `ranks`."""
    by_share: dict[str, list[str]] = {}
    for name, number, possible in count_revealing_tensors([*shown.values()], ranks):
        share = f"{number:,}" if number else "none"
        if number == possible == len(shown):
            share = "all"
        elif possible < len(shown):
            share = f"{share} of {possible:,}"
        by_share.setdefault(share, []).append(MISTAKES[name].says)
    text = [
        f"{share}{' would have revealed' * (number == 0)} {joined_list(says)}"
        for number, (share, says) in enumerate(by_share.items())
    ]
    silent = [name for name, one in shown.items() if not one.counts]
    if silent:
        zero = all(shown[name].zero for name in silent)
        more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
        text.append(
            f"{', '.join(silent[:_MOST_NAMED])}{more} could reveal no mistake"
            + (" (gradient zero on every rank)" if zero else "")
        )
    return f"of {len(shown):,} tensors, {'; '.join(text)}"


def joined_list(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"
