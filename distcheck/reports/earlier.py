"""What documents of earlier releases say in prose alone, read out of it once, for the pictures."""

from typing import Any

from distcheck.records.ends import PROVEN, RankEnd

_LOST_PEER = "its peer was gone"  # in the first line of what was known of a rank
_SIZES_DIFFER = "collective mismatch"  # gloo's own words


def complete(document: dict[str, Any]) -> None:
    """Adds what is said of the ends of ranks today, where a document has it in `detail` alone."""
    for case in document["cases"]:
        for outcome in case["outcomes"]:
            if outcome["outcome"] != RankEnd.FINISHED and "lost_peer" not in outcome:
                outcome.update(_facts(outcome["detail"]))


def _facts(detail: str) -> dict[str, Any]:
    first, *others = detail.splitlines() or [""]
    how, _, what = "".join(others[:1]).partition(": ")
    proven = next((word for word, said in PROVEN.items() if said == how), "")
    return {
        "lost_peer": _LOST_PEER in first,
        "sizes_differ": _SIZES_DIFFER in detail,
        **({"proven": proven, "why": what} if proven else {}),
    }
