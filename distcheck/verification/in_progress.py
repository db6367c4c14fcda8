"""A case while its worlds and judges are at work: what the session knows of it so far."""

import os
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from distcheck.backends import name_of
from distcheck.errors import CannotRunError, InternalError
from distcheck.judge import diagnosis
from distcheck.judge.diagnosis.facts import Facts
from distcheck.judge.rerun_bisection import Separation, TakingApart
from distcheck.machine.sealed_memory import sealed_memory
from distcheck.records import Case, CheckResult, Outcome
from distcheck.records.ends import RankEnd
from distcheck.training.traces.layout import TraceLayout
from distcheck.verification.case_runs import JudgedRun, PlannedRun, RecordedRun, is_separate
from distcheck.verification.process_state import state_lines
from distcheck.worlds.shares import Shared
from distcheck.worlds.surroundings import TOGETHER, Surroundings, separate

WorldName = Literal["world", "rerun", "further"]  # the first world; its rerun; what takes it apart

_INTERRUPTED = "the run was interrupted before it; let it end, and the cause is looked for"
_SHOWN: dict[WorldName, str] = {"world": "first run", "rerun": "rerun", "further": "further run"}


@dataclass
class InProgress:
    """A case on its way; only the session changes it."""

    plan: PlannedRun
    traces: dict[WorldName, int] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    rerun_outcomes: tuple[Outcome, ...] = ()
    surroundings: Surroundings = TOGETHER  # of the rerun
    rerun_in: str = ""  # the same, or why it is not what was asked for, for the report
    taking_apart: TakingApart | None = None
    of_rerun: list[CheckResult] | None = None  # what its own steps were judged to be
    separation: Separation | None = None
    results: list[CheckResult] = field(default_factory=list)
    seen: Facts | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    not_run: str = ""
    defect: InternalError | None = None
    judges_left: int = 0
    worlds_left: int = 0
    finished: bool = False

    @classmethod
    def after(cls, recorded: RecordedRun) -> "InProgress":
        """A case that was recorded before, as it was when its last world had ended."""
        fds: dict[WorldName, int] = {"world": recorded.trace_fd, "rerun": recorded.rerun_fd}
        return cls(
            recorded.plan,
            traces={what: fd for what, fd in fds.items() if fd >= 0},
            outcomes=recorded.outcomes,
            rerun_outcomes=recorded.rerun_outcomes,
            surroundings=recorded.surroundings,
            rerun_in=recorded.rerun_in,
            separation=recorded.separation,
            not_run=recorded.not_run,
            defect=recorded.defect,
        )

    @property
    def case(self) -> Case:
        """The case."""
        return self.plan.case

    def judged(self) -> JudgedRun:
        """What is known by now; all that ever will be, once it is finished."""
        recorded = RecordedRun(
            plan=self.plan,
            outcomes=self.outcomes,
            rerun_outcomes=self.rerun_outcomes,
            surroundings=self.surroundings,
            rerun_in=self.rerun_in,
            separation=self.separation,
            not_run=self.not_run,
            defect=self.defect,
            trace_fd=self.traces.get("world", -1),
            rerun_fd=self.traces.get("rerun", -1),
        )
        seen = self.seen
        if seen is None and not self.finished and diagnosis.worth_a_look(self.results):
            seen = Facts(world=self.case.world, trouble=_INTERRUPTED)
        return JudgedRun(
            recorded=recorded,
            results=tuple(self.results),
            seen=seen,
            timings_s=dict(self.timings_s),
        )

    def close(self) -> None:
        """Frees the traces."""
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
            self.rerun_in = f"not in separate interpreters: {why_not}"
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
        facts = self.plan.facts
        lines = state_lines(facts.strategy_file, facts.strategy_line, found)
        self.separation = msgspec.structs.replace(found, harmless=finished and passed, lines=lines)

    def shared_trace(self, what: WorldName) -> Shared:
        """The trace of a world, as its ranks are given it."""
        layout = self.plan.layout
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
