"""What the parts of a comparison hand to each other, and the verdict over it. No torch."""

import msgspec

from distcheck.contract import Contract, Training
from distcheck.recordings.differing import CHOSEN
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, Change, Diagnosis, Origin, VerdictName, merge_verdicts
from distcheck.records.by_module import ByModule
from distcheck.records.divergence import TraceComparison
from distcheck.worlds.jobs import Job


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Compare two traces of a case, then and now."""

    case: Case
    contracts: tuple[Contract, Contract]
    training: Training
    layouts: tuple[TraceLayout, TraceLayout]
    tensors: bool = True  # whether both traces hold tensors, or one of them digests alone


COMPARE = Job(
    "distcheck.compare.traces:compare_job", CompareRequest, TraceComparison, ("then", "now")
)


class CaseComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over one case; of two jobs, with the first module that parts, and what is to be
    said of the first operator.
    """

    id: str
    verdict: VerdictName
    bits: str  # "same", "changed", "not compared"
    reason: str
    found: TraceComparison = TraceComparison()
    changes: tuple[Change, ...] = ()
    diagnosis: tuple[Diagnosis, ...] = ()
    modules: ByModule | None = None
    op: str = ""


class RunsComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over all cases of two runs; `saved_to` is where the second one is kept if it was
    made for this.
    """

    then: str
    now: str
    cases: tuple[CaseComparison, ...]
    saved_to: str | None = None
    made: Origin | None = None

    @property
    def verdict(self) -> VerdictName:
        return merge_verdicts([case.verdict for case in self.cases])


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
    if found.judged and found.noise_floor:
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
