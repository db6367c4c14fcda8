"""The states of a case on its way from plan to report: planned, recorded, judged.

Each is frozen, and holds the one before it. What is between them, while worlds and judges of a case
are at work, is of the session alone (in_progress.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distcheck.backends import name_of
from distcheck.contract import Contract
from distcheck.errors import InternalError
from distcheck.judge.diagnosis.facts import Facts
from distcheck.judge.rerun_bisection import Separation
from distcheck.plan.coverage import PlannedCheck
from distcheck.records import Case, CheckResult, Outcome
from distcheck.training.jobs import CaseFacts
from distcheck.training.traces.layout import TraceLayout
from distcheck.worlds.surroundings import TOGETHER, Surroundings


def is_separate(case: Case) -> bool:
    """Whether a case's rerun is to be in separate interpreters: on the CPU, where LOCAL_RANK
    chooses no device, and not within a job of MPI's, whose ranks are its own, or in one process.
    """
    own_ranks = name_of(case.backend) in ("mpi", "simulated")
    return case.separate and case.rerun and case.device == "cpu" and not own_ranks


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A case, what was found out about it, and what its checks must compare."""

    case: Case
    facts: CaseFacts
    planned: tuple[PlannedCheck, ...]
    layout: TraceLayout
    notes: tuple[str, ...] = ()

    @property
    def contract(self) -> Contract:
        """What its strategy promises."""
        return self.facts.contract

    def noting(self, *notes: str) -> "PlannedRun":
        """With further notes for a person."""
        return replace(self, notes=(*self.notes, *notes))


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A case whose worlds are over: how their ranks ended, and what they recorded.

    `surroundings` are those of the rerun; `rerun_in` says the same, or why they are not what was
    asked for. `separation` is what further worlds have shown of a rerun that differed. `not_run`
    says why no rank was started, `defect` which one of distcheck's own ended a rank. Its traces
    are open as long as the one who hands it out says.
    """

    plan: PlannedRun
    outcomes: tuple[Outcome, ...] = ()
    rerun_outcomes: tuple[Outcome, ...] = ()
    surroundings: Surroundings = TOGETHER
    rerun_in: str = ""
    separation: Separation | None = None
    not_run: str = ""
    defect: InternalError | None = None
    trace_fd: int = -1
    rerun_fd: int = -1

    @property
    def case(self) -> Case:
        """The case."""
        return self.plan.case


@dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """A recorded case, and what its judges found: `seen` is what a closer look at a failed one has
    measured.
    """

    recorded: RecordedRun
    results: tuple[CheckResult, ...] = ()
    seen: Facts | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        """The case."""
        return self.recorded.plan.case
