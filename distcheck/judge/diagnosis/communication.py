"""Mistakes that the ledger of a step shows. They are warnings: values may still be right."""

from collections.abc import Iterator

from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.ledger import Ledger


def warn_of_ledger(ledger: Ledger | None) -> Iterator[Diagnosis]:
    """Yield the mistakes that the collectives of a step show, which no check may fail for."""
    if ledger is None:
        return
    short = ledger.too_short()
    if short:
        calls, dtypes = sum(row.calls for row in short), {row.dtype: None for row in short}
        yield name_cause(
            "reduced-in-short-dtype",
            f"step {ledger.step}: FSDP reduces in {' and '.join(dtypes)} in {calls} "
            f"call{'s' * (calls != 1)}, although every module's policy has reduce_dtype="
            f"{ledger.policy} ({short[0].operation} over the {short[0].ranks} ranks of "
            f"{short[0].group})",
        )
    if ledger.twice:
        name, first, second = ledger.twice[0]
        more = len(ledger.twice) - 1
        yield name_cause(
            "reduced-twice",
            f"step {ledger.step}: two all-reduces add the gradient of {name}"
            f"{f' (and of {more} more parameters)' * bool(more)} over the same ranks: "
            f"{first or 'torch'}, and then {second or 'torch'}",
        )
