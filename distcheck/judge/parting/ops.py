"""The operators of two runs of one step, side by side: the first that is given the same bits, and
makes others of them.

Both are walked until their operators are other ones. What an operator is given may also part before
any of them does: it then comes from elsewhere, as from code that torch.compile has compiled, from
an exchange, or from data.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from distcheck.recordings.jobs.ops import COMPILED, OpCall, Ops

_ORDER = ("made", "others", "given")  # by how much each says


@dataclass(frozen=True)
class Parted:
    """Where operators part: `made` other bits of the same, or were given other ones, or are others;
    `after` a collective if there was one before.
    """

    how: str  # "made", "given" or "others"
    place: int
    one: OpCall
    two: OpCall
    after: str = ""


def parted(one: Ops, two: Ops) -> Parted | None:
    """Where the operators of a step part; None where they do not, as far as both were noted."""
    collective = ""
    for place, (first, second) in enumerate(zip(one.calls, two.calls, strict=False)):
        if (first.name, first.part) != (second.name, second.part):
            return Parted("others", place, first, second)
        if first.inputs != second.inputs:
            return Parted("given", place, first, second, collective)
        if first.outputs != second.outputs:
            return Parted("made", place, first, second)
        collective = first.name if not first.outputs else collective
    return None


def first_op(steps: Iterable[tuple[int, int, Ops, Ops]]) -> str:
    """The sentence on the first operator that parts, over (step, rank); of the ranks of a step, one
    that makes other bits of the same comes first. Empty where nothing was heard of any.
    """
    found: dict[int, list[tuple[int, Parted]]] = {}
    compared = 0
    for step, rank, one, two in steps:
        if found and step not in found:
            break
        compared += min(len(one.calls), len(two.calls))
        if (where := parted(one, two)) is not None:
            found.setdefault(step, []).append((rank, where))
    for step, ranks in found.items():
        rank, where = min(ranks, key=lambda of: (_ORDER.index(of[1].how), of[1].place))
        return _sentence(where, f"step {step}, rank {rank}, number {where.place}")
    return f"no operator of {compared} parts before the jobs do" if compared else ""


def _sentence(where: Parted, at: str) -> str:
    one, two = where.one, where.two
    of = "" if one.part == "forward" else f", in {one.part}"
    within = f" in {one.module}{of}" if one.module else of
    if where.how == "others":
        return f"other operators run: {one.name}{within}, and {two.name} in the later job ({at})"
    if where.how == "given":
        source = (
            f"the exchange, {where.after}" if where.after
            else "no operator: compiled code, an extension, or data"
        )  # fmt: skip
        return f"{one.name}{within} is given other bits, which come from {source} ({at})"
    if one.name == COMPILED:
        name = one.module or "the model"
        return (
            f"first operator that parts: within {name}, which torch.compile has compiled: it is "
            f"given the same bits, and returns others ({at})"
        )
    if one.draws:
        return (
            f"first operator that parts: {one.name}{within} draws random numbers, and others than "
            f"in the earlier job ({at})"
        )
    return (
        f"first operator that parts: {one.name}{within} is given the same bits, and makes others "
        f"of them ({at})"
    )
