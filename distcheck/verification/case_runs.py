"""One case on its way from plan to report: what is known of it, and the traces of its worlds."""

import os
from dataclasses import dataclass, field
from typing import Literal

from distcheck.contract import Contract
from distcheck.errors import CannotRunError
from distcheck.judge.diagnosis.facts import Facts
from distcheck.judge.rerun_bisection import Separation, TakingApart
from distcheck.plan.coverage import PlannedCheck
from distcheck.records import Case, CheckResult, Outcome
from distcheck.records.ends import RankEnd
from distcheck.training.jobs import CaseFacts
from distcheck.training.traces.layout import TraceLayout
from distcheck.worlds.shares import Shared
from distcheck.worlds.surroundings import TOGETHER, Surroundings, separate

WorldName = Literal["world", "rerun", "further"]  # the first world; its rerun; what takes it apart

_FD_OF: dict[WorldName, str] = {
    "world": "trace_fd",
    "rerun": "rerun_fd",
    "further": "further_fd",
}


def is_separate(case: Case) -> bool:
    """Whether a case's rerun is to be in separate interpreters: on the CPU, where LOCAL_RANK
    chooses no device, and not within a job of MPI's, whose ranks are its own.
    """
    return case.separate and case.rerun and case.device == "cpu" and case.backend != "mpi"


@dataclass
class CaseRun:
    """A case on its way from plan to report."""

    case: Case
    facts: CaseFacts
    contract: Contract
    planned: list[PlannedCheck]
    layout: TraceLayout
    notes: list[str] = field(default_factory=list)
    trace_fd: int = -1
    rerun_fd: int = -1
    outcomes: list[Outcome] = field(default_factory=list)
    rerun_outcomes: list[Outcome] = field(default_factory=list)
    surroundings: Surroundings = TOGETHER  # of the rerun
    rerun_in: str = ""  # the same, or why it is not what was asked for, for the report
    taking_apart: TakingApart | None = None
    further_fd: int = -1  # the trace of a world that takes the rerun apart
    of_rerun: list[CheckResult] | None = None  # what its own steps were judged to be
    separation: Separation | None = None
    results: list[CheckResult] = field(default_factory=list)
    seen: Facts | None = None  # what a closer look at a failed case has measured
    timings_s: dict[str, float] = field(default_factory=dict)
    not_run: str = ""  # why no rank of it was started
    judges_left: int = 0
    worlds_left: int = 0
    finished: bool = False

    def close(self) -> None:
        """Frees the traces."""
        for name in _FD_OF.values():
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)

    def keep(self, fd: int, what: WorldName) -> None:
        """Takes the trace of a world, in place of an earlier one of its kind."""
        name = _FD_OF[what]
        if getattr(self, name) >= 0:
            os.close(getattr(self, name))
        setattr(self, name, fd)

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
        if not case.separate:
            why_not = "because of --no-separate"
        elif not is_separate(case):
            why_not = "ranks on a GPU" if case.device != "cpu" else f"backend {case.backend}"
        if why_not:
            self.rerun_in = f"not in separate interpreters: {why_not}"
            return
        self.surroundings = separate(case.seed, delayed=not case.delays)
        self.rerun_in = self.surroundings.describe(case.world)

    def shared_trace(self, what: WorldName) -> Shared:
        """The trace of a world, as its ranks are given it."""
        names = {"world": "first run", "rerun": "rerun", "further": "further run"}
        return Shared(
            fd=getattr(self, _FD_OF[what]),
            kind="trace",
            key=f"{self.case.id}, {names[what]}",
            size=self.layout.total_bytes,
            regions=self.layout.regions_of,
        )


def new_trace(layout: TraceLayout) -> int:
    """Shared memory for a trace; it takes up no more than what is written to it."""
    fd = os.memfd_create("distcheck-trace")
    try:
        os.ftruncate(fd, layout.total_bytes)
    except OSError as error:
        os.close(fd)
        raise CannotRunError(
            f"a trace of {layout.total_bytes / 2**30:.1f} GiB does not fit in shared memory: "
            f"{error.strerror} (ulimit -f?)"
        ) from error
    return fd
