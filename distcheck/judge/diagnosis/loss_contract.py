"""Says of a cause that the code would be right if its training loop scaled the loss as well."""

from collections.abc import Sequence

import msgspec

from distcheck.judge.diagnosis.facts import Facts
from distcheck.records import Diagnosis
from distcheck.records.causes import suggested

# What another factor on the loss may look like; anything else is not explained by it.
_BY_SCALE = (
    "missing-division", "double-division", "wrong-divisor", "unweighted-mean", "unweighted-tokens",
    "padding-counted",
)  # fmt: skip


def with_hint(found: Sequence[Diagnosis], facts: Facts) -> list[Diagnosis]:
    """The same causes; the first that a loss contract would explain says so. Only where all that
    was recorded is right under that contract, which was computed, not guessed.
    """
    chosen = next((d for cause in _BY_SCALE for d in found if d.cause == cause), None)
    chosen = chosen or next((d for d in found if d.cause == "unexplained"), None)
    if chosen is None or not facts.right_under:
        return list(found)
    names = " or ".join(f"--loss {name}" for name in facts.right_under)
    hinted = msgspec.structs.replace(
        chosen,
        evidence=f"{chosen.evidence}; every gradient of every rank and step is right under {names}",
        suggestion=f"{chosen.suggestion}; {suggested(chosen.cause, 'loss-contract', names=names)}",
    )
    return [hinted if d is chosen else d for d in found]
