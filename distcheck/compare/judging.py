"""The verdict over what two recordings have in common, and the sentence that goes with it."""

from distcheck.compare.records import CaseComparison
from distcheck.recordings.differing import CHOSEN
from distcheck.records import Change, VerdictName
from distcheck.records.parting import TraceComparison


def judge(
    found: TraceComparison,
    changed: list[Change],
    said: tuple[VerdictName, VerdictName],
    *,
    bits: bool,
    needs_bound: bool = False,
) -> tuple[VerdictName, str]:
    """The verdict, and the sentence that goes with it. With `needs_bound`, changed bits pass only
    within a bound: the two need not be one computation.
    """
    then, now = said
    if found.why_not:
        return "unknown", found.why_not
    if found.first is None:
        if now == "pass":
            return "pass", "all bits are identical"
        return now, f"all bits are identical, but the later run's own verdict is {now}"
    if found.beyond is not None:
        return "fail", "beyond the largest difference of two correct results"
    if now != "pass" or then != "pass":
        verdict: VerdictName = "fail" if "fail" in said else "unknown"
        return verdict, f"the earlier run's own verdict is {then}, the later one's {now}"
    if found.kind in CHOSEN:
        return "unknown", f"the runs do not compute the same from there on: {found.kind} differ"
    machine = [change for change in changed if change.kind == "machine"]
    if bits and machine:
        return "unknown", f"bits may differ between machines: {machine[0]}"
    reason = f"{_held(found)}; both runs are correct by their own verdicts"
    if bits:
        return "fail", reason
    if needs_bound and not found.judged:
        return "unknown", reason
    return ("unknown" if found.not_judged else "pass"), reason


def _held(found: TraceComparison) -> str:
    """What differs, next to its bound."""
    if found.not_judged:
        return "it is not known whether the first step that differs is within the bound"
    if found.judged and found.yardstick:
        return "within the bound at every step that was judged"
    if found.judged:
        return "within the bound at the first step that differs"
    return "no bound is derived for the first difference"


def judged(
    name: str,
    found: TraceComparison,
    changed: list[Change],
    said: tuple[VerdictName, VerdictName],
    *,
    bits: bool,
    needs_bound: bool = False,
    remark: str = "",
) -> CaseComparison:
    """The same over one case, with a `remark` behind the sentence."""
    verdict, reason = judge(found, changed, said, bits=bits, needs_bound=needs_bound)
    same = "same" if found.first is None else "changed"
    return CaseComparison(
        id=name,
        verdict=verdict,
        bits="not compared" if found.why_not else same,
        reason="; ".join(filter(None, [reason, remark])),
        found=found,
        changes=tuple(changed),
    )
