"""What the parts of a comparison hand to each other. No torch."""

import msgspec

from distcheck.contract import Contract, Training
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, Change, Diagnosis, Origin, VerdictName, merge_verdicts
from distcheck.records.by_module import ByModule
from distcheck.records.parting import TraceComparison
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
