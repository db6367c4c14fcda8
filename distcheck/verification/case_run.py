"""The state of a case from plan to report: facts, and results so far."""

import os
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from distcheck.backends import name_of
from distcheck.contract import Contract
from distcheck.errors import CannotRunError, DistcheckError, InternalError
from distcheck.judge import diagnosis
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.judge.rerun_bisection import BisectionResult, RerunBisection
from distcheck.machine.sealed_memory import sealed_memory
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, CheckResult, Outcome, PlannedCheck
from distcheck.records.exit_status import RankEnd
from distcheck.records.ledger import Ledger
from distcheck.records.run_facts import SEPARATELY
from distcheck.training.jobs import CaseFacts
from distcheck.verification.process_state import shown_state_lines
from distcheck.worlds.shares import Shared
from distcheck.worlds.surroundings import TOGETHER, Surroundings, separate

WorldName = Literal["world", "rerun", "further"]  # the first world; its rerun; bisection of a rerun

_LEAST_FURTHER_DEADLINE_S, _FURTHER_DEADLINE = 5.0, 10.0  # seconds; times the first world's time
_INTERRUPTED = (
    "the run was interrupted before this case; run again without interruption to find the cause"
)
_SHOWN: dict[WorldName, str] = {"world": "first run", "rerun": "rerun", "further": "further run"}


def is_separate(case: Case) -> bool:
    """Return True if a case's rerun uses separate interpreters: on the CPU, where LOCAL_RANK
    selects no device, and not for MPI jobs and single-process worlds.
    """
    own_ranks = name_of(case.backend) in ("mpi", "simulated")
    return case.separate and case.rerun and case.device == "cpu" and not own_ranks


@dataclass(eq=False, kw_only=True)
class CaseRun:
    """A case, its required coverage, the exit status of its ranks, and the judges' results.

    surroundings  of the rerun; `rerun_in` describes them, or why they differ from the request
    taking_apart  bisects a rerun that differed; `separation` is the result
    of_rerun      check results of the rerun's steps, if it was judged as well
    seen          measurements of a failed case
    like          case that fails in the same way and was measured instead
    not_run       reason that no rank was started, or that the run does not count
    defect        defect of distcheck that ended a rank
    refused       error with which a rank refused to run
    kept          True if the owner closes the case, not the session

    Only the session changes a case while it runs.
    """

    case: Case
    facts: CaseFacts
    planned: tuple[PlannedCheck, ...]
    layout: TraceLayout
    notes: tuple[str, ...] = ()
    traces: dict[WorldName, int] = field(default_factory=dict)
    ledger: Ledger | None = None
    outcomes: tuple[Outcome, ...] = ()
    rerun_outcomes: tuple[Outcome, ...] = ()
    surroundings: Surroundings = TOGETHER
    rerun_in: str = ""
    taking_apart: RerunBisection | None = None
    of_rerun: list[CheckResult] | None = None
    separation: BisectionResult | None = None
    results: list[CheckResult] = field(default_factory=list)
    seen: Measurements | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    not_run: str = ""
    defect: InternalError | None = None
    refused: DistcheckError | None = None
    kept: bool = False
    like: "CaseRun | None" = None
    judges_left: int = 0
    awaited: WorldName | None = None  # the world that it waits for; None if for judges
    finished: bool = False

    @property
    def contract(self) -> Contract:
        return self.facts.contract

    def cut_short(self) -> None:
        """Record that the run ended before pending measurements."""
        if self.seen is None and not self.finished and diagnosis.needs_diagnosis(self.results):
            self.seen = Measurements(world=self.case.world, trouble=_INTERRUPTED)

    def close(self) -> None:
        while self.traces:
            os.close(self.traces.popitem()[1])

    def keep(self, fd: int, what: WorldName) -> None:
        """Keep the trace of a world; close an earlier trace of the same kind of world."""
        if what in self.traces:
            os.close(self.traces[what])
        self.traces[what] = fd

    @property
    def rerun_differed(self) -> bool:
        """Return True if the rerun ended differently from the first world, or its bits differ."""
        if any(outcome.outcome != RankEnd.FINISHED for outcome in self.rerun_outcomes):
            return True
        return any(r.check == "rerun" and r.verdict == "fail" for r in self.results)

    def decide_surroundings(self, why_not: str) -> None:
        """Set the rerun's surroundings. `why_not` is the reason that no separate interpreters are
        available. The user's delays apply only to the first world; the rerun shows their effect.
        """
        case = self.case
        in_one_process = name_of(case.backend) == "simulated"
        if not case.separate:
            why_not = "because of --no-separate"
        elif in_one_process:
            why_not = ""
        elif not is_separate(case):
            why_not = "ranks on a GPU" if case.device != "cpu" else f"backend {case.backend}"
        if why_not:
            self.rerun_in = f"not {SEPARATELY}: {why_not}"
            return
        self.surroundings = separate(
            case.seed, delayed=not case.delays, in_one_process=in_one_process
        )
        self.rerun_in = self.surroundings.describe(case.world)

    def conclude(self, found: BisectionResult) -> None:
        """Set the result of bisecting the rerun, suspicious lines, and if the rerun passed."""
        finished = all(outcome.outcome == RankEnd.FINISHED for outcome in self.rerun_outcomes)
        passed = bool(self.of_rerun) and all(r.verdict == "pass" for r in self.of_rerun or ())
        facts = self.facts
        lines = shown_state_lines(facts.strategy_file, facts.strategy_line, found)
        self.separation = msgspec.structs.replace(found, harmless=finished and passed, lines=lines)

    def deadline_s(self, what: WorldName) -> float:
        """Return the deadline of a world. Worlds that bisect a rerun have a shorter one, since
        several may hang, and the first world shows the usual duration.
        """
        if what != "further":
            return self.case.deadline_s
        usual_s = _FURTHER_DEADLINE * self.timings_s.get("world", 0.0)
        return min(self.case.deadline_s, max(_LEAST_FURTHER_DEADLINE_S, usual_s))

    def shared_trace(self, what: WorldName) -> Shared:
        layout = self.layout
        return Shared(
            fd=self.traces[what],
            kind="trace",
            key=f"{self.case.id}, {_SHOWN[what]}",
            size=layout.total_bytes,
            regions=layout.regions_of,
        )


def new_trace(layout: TraceLayout) -> int:
    """Allocate shared memory for a trace. Unwritten parts use no memory."""
    try:
        return sealed_memory("distcheck-trace", layout.total_bytes)
    except OSError as error:
        raise CannotRunError(
            f"a trace of {layout.total_bytes / 2**30:.1f} GiB does not fit in shared memory: "
            f"{error.strerror} (ulimit -f?)"
        ) from error
