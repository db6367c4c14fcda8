"""From what an audit measured on all ranks to what is wrong with the exchange, if anything is."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from distcheck.job.guard import audit, comparing
from distcheck.job.guard.audit import Audit
from distcheck.job.guard.records import LEFT_OUT, OTHER, OWN, ReplicaFinding

Rows = list[list[float | None]]  # JSON has no NaN


def measured(own: Audit) -> bytes:
    """What this rank measured, to be sent; it is forgotten here."""
    rows, own.rows = own.rows, []
    return msgspec.json.encode(
        [[one if math.isfinite(one) else None for one in row] for row in rows]
    )


def concluded(
    own: Audit, gathered: Sequence[bytes], ranks: Sequence[int], names: Mapping[int, str]
) -> tuple[ReplicaFinding | None, list[str]]:
    """What is wrong, and what is to be said of the audit. `names`: of parameters, by id."""
    remarks = []
    if own.left_out:
        remarks.append(
            f"{own.left_out} parameters are not audited: they are divided by another than "
            "fully_shard, or not trained"
        )
    sent = [msgspec.json.decode(one, type=Rows) for one in gathered]
    if not sent[0] or len({len(one) for one in sent}) > 1:
        return None, [*remarks, "an audit measured nothing, or not the same on all ranks"]
    rows = [[[math.nan if n is None else n for n in row] for row in one] for one in sent]
    rows = audit.added_up(rows, [leaf.copies for leaf in own.leaves])
    mean = audit.judge(rows, [own.roundoff(leaf) for leaf in own.leaves])
    if mean is None and own.is_early:
        return None, remarks
    if mean is None:
        return None, [*remarks, "all gradients were absent or zero, and an audit compared nothing"]
    if mean.wrong:
        wrong = [names.get(id(own.leaves[place].parameter), "?") for place in mean.wrong]
        where = sorted({ranks[at] for places in mean.wrong.values() for at in places})
        found = ReplicaFinding(
            kind=comparing.EXCHANGE, first=wrong[0], groups=(tuple(where),), differing=len(wrong),
            compared=mean.compared, names=tuple(wrong[:64]), what=OWN if mean.own else OTHER,
        )  # fmt: skip
        return found, remarks
    if mean.left_out:
        left = tuple(ranks[at] for at in mean.left_out)
        found = ReplicaFinding(
            kind=comparing.EXCHANGE, first="", groups=(left,), differing=0, compared=mean.compared,
            what=LEFT_OUT,
        )  # fmt: skip
        return found, remarks
    if not mean.is_even:
        shares = ", ".join(f"{one / sum(mean.weights):.4g}" for one in mean.weights)
        remarks.append(
            f"ranks count by {shares} in what the optimizer gets, which is right where the script "
            "weights them by samples or tokens"
        )
    return None, remarks
