"""Records of a comparison, and its verdict. Does not import torch."""

import msgspec

from distcheck.contract import Contract, Training
from distcheck.recordings.differing import CHOSEN, INITIAL, TraceComparison
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, Change, Diagnosis, Origin, VerdictName, merge_verdicts
from distcheck.records.run_facts import ModuleComparison
from distcheck.worlds.jobs import Job


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to compare two traces of a case, then and now."""

    case: Case
    contracts: tuple[Contract, Contract]
    training: Training
    layouts: tuple[TraceLayout, TraceLayout]
    tensors: bool = True  # False if one of the traces holds only digests


COMPARE = Job(
    "distcheck.compare.traces:compare_job", CompareRequest, TraceComparison, ("then", "now")
)


class ScoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """A scored token: its sequence and position from 0, its id, its log-probability in both files
    and its noise floor, in nats.
    """

    sequence: int
    position: int
    token: int
    then: float
    now: float
    noise_floor: float


class ScoresComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two files of log-probabilities, in nats.

    mean, signed_mean  mean of the distances, and of the differences
    noise_floor        its mean; None: not measured
    beyond             number of tokens beyond their bound
    first, worst       the first of them, and tokens with the largest multiples of their noise floor
    not_detected       mistakes that a pass would not have detected
    by_position, by_sequence  mean distance and noise floor of each
    """

    tokens: int
    sequences: int
    mean: float
    signed_mean: float
    noise_floor: float | None
    beyond: int
    first: ScoredToken | None
    worst: tuple[ScoredToken, ...]
    not_detected: tuple[str, ...]
    by_position: tuple[tuple[float | None, float | None], ...]
    by_sequence: tuple[tuple[float | None, float | None], ...]


class CaseComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over one case. For two jobs, it also has the first module that differs and a text
    on the first operator that differs. For two files of log-probabilities, it has `scores`
    instead of `found`.
    """

    id: str
    verdict: VerdictName
    bits: str  # "same", "changed", "not compared"
    reason: str
    found: TraceComparison = TraceComparison()
    changes: tuple[Change, ...] = ()
    diagnosis: tuple[Diagnosis, ...] = ()
    modules: ModuleComparison | None = None
    op: str = ""
    scores: ScoresComparison | None = None


class RunsComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over all cases of two runs. `saved_to` is the folder of the second run, if the
    comparison made one.
    """

    then: str
    now: str
    cases: tuple[CaseComparison, ...]
    saved_to: str | None = None
    made: Origin | None = None

    @property
    def verdict(self) -> VerdictName:
        return merge_verdicts([case.verdict for case in self.cases])


def verdict_on_changes(
    found: TraceComparison,
    changed: list[Change],
    said: tuple[VerdictName, VerdictName],
    *,
    bits: bool,
    needs_bound: bool = False,
) -> tuple[VerdictName, str]:
    """Return the verdict and its reason. With `needs_bound`, changed bits pass only within a bound,
    because the two jobs need not perform the same computation.
    """
    then, now = said
    if found.why_not:
        return "unknown", found.why_not
    if found.first is None:
        if now == "pass":
            return "pass", "all bits are identical"
        return now, f"all bits are identical, but the verdict of the later run is {now}"
    if found.beyond is not None:
        return "fail", "the difference is larger than between two correct runs"
    if now != "pass" or then != "pass":
        verdict: VerdictName = "fail" if "fail" in said else "unknown"
        return verdict, f"the verdict of the earlier run is {then}, and of the later run {now}"
    if found.kind in CHOSEN:
        begin = "; start both from the same parameters" if found.kind == INITIAL else ""
        return "unknown", f"the runs differ in their {found.kind}, and diverge from there on{begin}"
    machine = [change for change in changed if change.kind == "machine"]
    if bits and machine:
        return "unknown", f"results may not be bit-identical across machines: {machine[0]}"
    reason = f"{_relate_to_bound(found)}, and both runs passed"
    if bits:
        return "fail", reason
    if needs_bound and not found.judged:
        return "unknown", reason
    return ("unknown" if found.not_judged else "pass"), reason


def _relate_to_bound(found: TraceComparison) -> str:
    if found.not_judged:
        return "it is unknown if the first difference is within its bound"
    if found.judged and found.noise_floor:
        return "every judged step is within its bound"
    if found.judged:
        return "the first difference is within its bound"
    return "the first difference has no bound"


def compared_case(
    name: str,
    found: TraceComparison,
    changed: list[Change],
    said: tuple[VerdictName, VerdictName],
    *,
    bits: bool,
    needs_bound: bool = False,
    remark: str = "",
) -> CaseComparison:
    """Return the verdict over one case, with `remark` appended to its reason."""
    verdict, reason = verdict_on_changes(found, changed, said, bits=bits, needs_bound=needs_bound)
    same = "same" if found.first is None else "changed"
    return CaseComparison(
        id=name,
        verdict=verdict,
        bits="not compared" if found.why_not else same,
        reason="; ".join(filter(None, [reason, remark])),
        found=found,
        changes=tuple(changed),
    )
