"""What the parts of a comparison hand to each other. No torch."""

import msgspec

from distcheck.contract import Contract, Training
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, Change, Difference, Origin, VerdictName, merge_verdicts
from distcheck.worlds.jobs import Job


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Compare two traces of a case, then and now."""

    case: Case
    contracts: tuple[Contract, Contract]
    training: Training
    layouts: tuple[TraceLayout, TraceLayout]
    tensors: bool = True  # whether both traces hold tensors, or one of them digests alone


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one kind differed, over all steps and ranks."""

    kind: str
    tensors: int
    changed: int


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What two traces have in common.

    first        where bits differ first, in the order in which a step computes them; None: nowhere
    kind         what that is: initial state, sample ids, gradients, ...
    beyond       the place, at that same step, that is worst beyond its bound; None: all within
    judged       elements at that step for which a bound could be derived
    not_judged   tensors at that step that differ and have a bound, where digests alone are known
    by_digest    whether one of the traces holds digests alone: nothing is known of distances
    moments      per kind, how many tensors were compared and how many changed
    drift        per step, the relative L2 distance of rank 0's parameters after it; empty by digest
    why_not      why nothing could be compared; empty where it could
    """

    first: Difference | None = None
    kind: str = ""
    beyond: Difference | None = None
    judged: int = 0
    not_judged: int = 0
    by_digest: bool = False
    moments: tuple[Moment, ...] = ()
    drift: tuple[float, ...] = ()
    why_not: str = ""


COMPARE = Job(
    "distcheck.compare.traces:compare_job", CompareRequest, TraceComparison, ("then", "now")
)


class CaseComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over one case."""

    id: str
    verdict: VerdictName
    bits: str  # "same", "changed", "not compared"
    reason: str
    found: TraceComparison = TraceComparison()
    changes: tuple[Change, ...] = ()


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
        """The worst verdict of any case."""
        return merge_verdicts([case.verdict for case in self.cases])
