"""A case on its way from plan to report: what was found out of it, and what is known by now."""

import os
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from distcheck.backends import name_of
from distcheck.contract import Contract
from distcheck.errors import CannotRunError, DistcheckError, InternalError
from distcheck.judge import diagnosis
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.judge.rerun_bisection import Separation, TakingApart
from distcheck.machine.sealed_memory import sealed_memory
from distcheck.plan.coverage import PlannedCheck
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, CheckResult, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.run_facts import SEPARATELY
from distcheck.training.jobs import CaseFacts
from distcheck.verification.process_state import state_lines
from distcheck.worlds.shares import Shared
from distcheck.worlds.surroundings import TOGETHER, Surroundings, separate

WorldName = Literal["world", "rerun", "further"]  # the first world; its rerun; what takes it apart

_LEAST_FURTHER_DEADLINE_S, _FURTHER_DEADLINE = 5.0, 10.0  # seconds; times the first world's
_INTERRUPTED = "the run was interrupted before it; let it end, and the cause is looked for"
_SHOWN: dict[WorldName, str] = {"world": "first run", "rerun": "rerun", "further": "further run"}


def is_separate(case: Case) -> bool:
    """Whether a case's rerun is to be in separate interpreters: on the CPU, where LOCAL_RANK
    chooses no device, and not within a job of MPI's, whose ranks are its own, or in one process.
    """
    own_ranks = name_of(case.backend) in ("mpi", "simulated")
    return case.separate and case.rerun and case.device == "cpu" and not own_ranks


@dataclass(eq=False, kw_only=True)
class CaseRun:
    """A case, what its checks must compare, how its ranks ended, and what judges found.

    `surroundings` are those of the rerun; `rerun_in` says the same, or why they are not what was
    asked for. `taking_apart` is how a rerun that differed is looked at, `of_rerun` what its own
    steps were judged to be, `separation` what further worlds have shown of it. `seen` is what a
    closer look at a failed case has measured, `like` the case that fails in the same way and was
    looked at in its place. `not_run` says why no rank was started, or why
    what ran does not count, `defect` which one of distcheck's own ended a rank, `refused` what a
    rank refused to run. Only the session changes it while it runs; one that is `kept` is closed by
    another.
    """

    case: Case
    facts: CaseFacts
    planned: tuple[PlannedCheck, ...]
    layout: TraceLayout
    notes: tuple[str, ...] = ()
    traces: dict[WorldName, int] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    rerun_outcomes: tuple[Outcome, ...] = ()
    surroundings: Surroundings = TOGETHER
    rerun_in: str = ""
    taking_apart: TakingApart | None = None
    of_rerun: list[CheckResult] | None = None
    separation: Separation | None = None
    results: list[CheckResult] = field(default_factory=list)
    seen: Measurements | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    not_run: str = ""
    defect: InternalError | None = None
    refused: DistcheckError | None = None
    kept: bool = False
    like: "CaseRun | None" = None
    judges_left: int = 0
    worlds_left: int = 0
    finished: bool = False

    @property
    def contract(self) -> Contract:
        return self.facts.contract

    def cut_short(self) -> None:
        """Says, where a closer look was due, that the run ended before it."""
        if self.seen is None and not self.finished and diagnosis.needs_diagnosis(self.results):
            self.seen = Measurements(world=self.case.world, trouble=_INTERRUPTED)

    def close(self) -> None:
        while self.traces:
            os.close(self.traces.popitem()[1])

    def keep(self, fd: int, what: WorldName) -> None:
        """Takes the trace of a world, in place of an earlier one of its kind."""
        if what in self.traces:
            os.close(self.traces[what])
        self.traces[what] = fd

    @property
    def rerun_differed(self) -> bool:
        """Whether the rerun ended in another way than the first world, or left other bits."""
        if any(outcome.outcome != RankEnd.FINISHED for outcome in self.rerun_outcomes):
            return True
        return any(r.check == "rerun" and r.verdict == "fail" for r in self.results)

    def decide_surroundings(self, why_not: str) -> None:
        """Those of the rerun; `why_not` says why there are no separate interpreters, if so. A
        person's own delays are for the first world, and the rerun is there to show what they
        change: it has none.
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

    def conclude(self, found: Separation) -> None:
        """Takes what further worlds have shown of a rerun that differed, with the lines that it
        may come from, and whether what it did is right as well.
        """
        finished = all(outcome.outcome == RankEnd.FINISHED for outcome in self.rerun_outcomes)
        passed = bool(self.of_rerun) and all(r.verdict == "pass" for r in self.of_rerun or ())
        facts = self.facts
        lines = state_lines(facts.strategy_file, facts.strategy_line, found)
        self.separation = msgspec.structs.replace(found, harmless=finished and passed, lines=lines)

    def deadline_s(self, what: WorldName) -> float:
        """Of a world: one that takes a rerun apart may be one of several that hang, and the first
        world has shown how long one takes that does not.
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
    """Shared memory for a trace; it takes up no more than what is written to it."""
    try:
        return sealed_memory("distcheck-trace", layout.total_bytes)
    except OSError as error:
        raise CannotRunError(
            f"a trace of {layout.total_bytes / 2**30:.1f} GiB does not fit in shared memory: "
            f"{error.strerror} (ulimit -f?)"
        ) from error
