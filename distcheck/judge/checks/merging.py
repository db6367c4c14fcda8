"""Merges a check's results, and compares them with the required coverage, without torch."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from distcheck.records import CheckResult, Compared, Difference, Number, VerdictName, merge_verdicts
from distcheck.records.mistakes import merge_revealed_mistakes

Result = TypeVar("Result", bound=Any)  # of a check: `CheckResult`, or its entry in a document


def share_of_bound(difference: Difference) -> float:
    """Return error / bound. With a bound of zero, any error gives a very large number."""
    error, bound = float(difference.error), float(difference.bound)
    if math.isnan(error):
        return math.inf
    if bound == 0:
        return error * 1e308 if error else 0.0
    return error / bound


def merge_results(parts: Sequence[CheckResult]) -> CheckResult:
    """Merge the results for disjoint sets of steps, in step order."""
    failed = [part for part in parts if part.first is not None]
    first = min(failed, key=lambda part: part.first.step if part.first else 0, default=None)
    verdicts: list[VerdictName] = [part.verdict for part in parts]
    worst = max(
        (part.worst for part in parts if part.worst is not None), key=share_of_bound, default=None
    )
    shown = merge_revealed_mistakes([part.shown for part in parts])
    shares: dict[str, dict[int, Number]] = {}
    for part in parts:
        for name, row in part.shares.items():
            shares.setdefault(name, {}).update(row)
    compared = _add_coverage([part.compared for part in parts])
    if shown:  # a tensor may count at the steps of one part only
        tensors = sum(found.counts for found in shown.values())
        compared = msgspec.structs.replace(compared, tensors=max(tensors, compared.tensors))
    return CheckResult(
        check=parts[0].check,
        layer=parts[0].layer,
        verdict=merge_verdicts(verdicts),
        compared=compared,
        insensitive=_insensitive(parts, compared),
        shown=shown,
        shares=shares,
        in_bits=all(part.in_bits for part in parts),
        worst=worst,
        first=first.first if first else None,
        reason="; ".join(dict.fromkeys(part.reason for part in parts if part.reason)),
        lead=next((part.first_reason for part in parts if part.reason), ""),
        kinds=tuple(dict.fromkeys(kind for part in parts for kind in part.kinds)),
        excuse="; ".join(dict.fromkeys(part.excuse for part in parts if part.excuse)),
        defect=next((part.defect for part in parts if part.defect), ""),
    )


def move_excuse_to_reason(result: CheckResult) -> CheckResult:
    """Return a complete result with its excuses moved to the reason. A failed result loses them."""
    reasons = [result.reason] if result.verdict == "fail" else [result.reason, result.excuse]
    return msgspec.structs.replace(result, reason="; ".join(filter(None, reasons)), excuse="")


def _add_coverage(parts: Sequence[Compared]) -> Compared:
    return Compared(
        tensors=max(part.tensors for part in parts),
        elements=sum(part.elements for part in parts),
        ranks=max(part.ranks for part in parts),
        steps=sum(part.steps for part in parts),
    )


def _insensitive(parts: Sequence[CheckResult], compared: Compared) -> Compared:
    """Return the coverage of insensitive comparisons without tensors and ranks of others."""
    looked_at = [
        Compared(
            tensors=part.compared.tensors + part.insensitive.tensors,
            elements=part.insensitive.elements,
            ranks=part.compared.ranks + part.insensitive.ranks,
            steps=part.insensitive.steps,
        )
        for part in parts
    ]
    both = _add_coverage(looked_at)
    return msgspec.structs.replace(
        both,
        tensors=max(0, both.tensors - compared.tensors),
        ranks=max(0, both.ranks - compared.ranks),
    )


def earliest_failure(results: Sequence[Result], verdict: VerdictName = "fail") -> Result | None:
    """Return the failed result (or one with a different `verdict`) that diverges first: by step,
    then in the order of the checks.

    A wrong gradient changes results at the next step, so the order of the checks alone would name a
    consequence. Results that failed without a place come last.
    """
    failed = [result for result in results if result.verdict == verdict]
    return min(
        failed,
        key=lambda result: result.first.step if result.first is not None else math.inf,
        default=None,
    )


def require_coverage(result: CheckResult, required: Compared) -> CheckResult:
    """Change a pass with less than the planned coverage to unknown, and list the missing part."""
    if result.verdict != "pass":
        return result
    compared, insensitive = result.compared, result.insensitive
    missing = [
        f"{have:,} of {want:,} {what}"
        for what, have, want in (
            ("tensors", compared.tensors + insensitive.tensors, required.tensors),
            ("elements", compared.elements + insensitive.elements, required.elements),
            ("ranks", compared.ranks + insensitive.ranks, required.ranks),
            ("steps", compared.steps + insensitive.steps, required.steps),
        )
        if have < want
    ]
    if not missing:
        return result
    reason = "; ".join(filter(None, [f"compared only {', '.join(missing)}", result.reason]))
    return msgspec.structs.replace(result, verdict="unknown", reason=reason)
