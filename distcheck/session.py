"""Runs planned cases on a pool: worlds one after the other, judges beside them.

A case goes through: first world -> its steps judged, while the second world reruns it -> what
spans the whole run judged -> its report. Worlds are never run two at a time, because their ranks
fill the cores; judges run beside them.
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import msgspec

from distcheck import diagnosis, limits
from distcheck.cells import CELLS
from distcheck.contract import Contract
from distcheck.cores import cores
from distcheck.diagnosis.facts import Facts
from distcheck.errors import CannotRunError, ExitCode
from distcheck.jobs import JUDGE, OBSERVE, RECORD, CaseFacts, JudgeJob, ObserveJob, RecordJob
from distcheck.owed import PlannedCheck
from distcheck.records import Case, CheckResult, Outcome
from distcheck.remarks import FULL_BATCH_LAYERS
from distcheck.traces.layout import TraceLayout, steps_written
from distcheck.worlds import blame
from distcheck.worlds.launch import end_now, error_of, start_job, start_world
from distcheck.worlds.messages import Progress
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.shares import Shared
from distcheck.worlds.world import World

_MOST_JUDGES = 16
_MOST_JUDGES_ON_GPU = 2  # each holds a CUDA context and a model there
_LONG_WORLD_S = 2.0  # beyond this, another process to judge with costs nothing
_JUDGE_PER_RANK_S = 1.0  # of a core's time, which the world can have used
_JUDGE_DEADLINE_S = 600.0  # without any sign of work; a judge says what it begins


class Listener(Protocol):
    """Whoever wants to see progress as it happens."""

    def preparing(self, what: str) -> None:
        """Before any case runs."""
        ...

    def planned(self, cases: Sequence[Case]) -> None:
        """Every case that will run."""
        ...

    def progress(self, case: Case, what: str) -> None:
        """A case moved on."""
        ...

    def finished(self, case: Case) -> None:
        """A case has been judged."""
        ...


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
    results: list[CheckResult] = field(default_factory=list)
    seen: Facts | None = None  # what a closer look at a failed case has measured
    timings_s: dict[str, float] = field(default_factory=dict)
    judges_left: int = 0
    worlds_left: int = 0
    finished: bool = False

    def close(self) -> None:
        """Frees the traces."""
        for name in ("trace_fd", "rerun_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


@dataclass(frozen=True)
class _Judging:
    run: CaseRun
    steps: tuple[int, ...]
    planned: tuple[tuple[str, str], ...]
    whole_run: bool
    closer_look: bool = False


class Session:
    """Runs cases to their end. `on_finished` is called with each as it is done."""

    def __init__(
        self,
        pool: Pool,
        listener: Listener,
        *,
        description: bytes,
        data_fd: int | None,
    ) -> None:
        self._pool, self._listener = pool, listener
        self._description, self._data_fd = description, data_fd
        self._worlds: deque[tuple[CaseRun, bool]] = deque()
        self._judgings: deque[_Judging] = deque()
        self._world: tuple[World, CaseRun, bool] | None = None
        self._judges: list[tuple[World, _Judging]] = []
        self._on_finished: Callable[[CaseRun], None] = lambda run: None
        # Twice the cores, so that the last few share them instead of leaving one idle.
        self._cores = cores()
        self._most_judges = min(2 * self._cores, _MOST_JUDGES)

    def run(self, runs: Sequence[CaseRun], *, on_finished: Callable[[CaseRun], None]) -> None:
        """Blocks until every case is finished; ends everything it started if interrupted."""
        self._on_finished = on_finished
        for run in runs:
            run.worlds_left = 2 if run.case.rerun else 1
            self._worlds.append((run, False))
        self._until_finished(runs)

    def rejudge(self, run: CaseRun) -> None:
        """Judges a case whose traces are there already; starts no rank."""
        self._plan_step_judges(run)
        self._judge_whole_run_if_due(run)
        self._until_finished([run])

    def _until_finished(self, runs: Sequence[CaseRun]) -> None:
        try:
            while not all(run.finished for run in runs):
                self._start_what_fits()
                self._pool.pump(0.05)
                self._tick_world()
                self._tick_judges()
        except BaseException:
            self._end_everything()
            raise

    def _start_what_fits(self) -> None:
        if self._world is None and self._worlds and len(self._judgings) < self._most_judges:
            run, again = self._worlds.popleft()
            self._world = (self._start_ranks(run, again=again), run, again)
        while self._judgings and self._has_room_for(self._judgings[0]):
            judging = self._judgings.popleft()
            self._judges.append((self._start_judge(judging), judging))

    def _has_room_for(self, judging: _Judging) -> bool:
        """Whether another judge may start: there are processes and, as far as known, memory."""
        if not self._judges:
            return True
        if judging.run.case.judged_on != "cpu" and len(self._judges) >= _MOST_JUDGES_ON_GPU:
            return False
        needed = limits.reference_bytes(judging.run.case, judging.run.facts, judging.run.layout)
        return len(self._judges) < self._most_judges and limits.available_bytes() > 2 * needed

    def _start_ranks(self, run: CaseRun, *, again: bool) -> World:
        case = run.case
        fd = _new_trace(run.layout)
        if again:
            run.rerun_fd = fd
        else:
            run.trace_fd = fd
        fds = [_shared_trace(run, again=again)]
        if self._data_fd is not None:
            fds.append(Shared(fd=self._data_fd, kind="data"))
        if again:
            fds.append(_shared_trace(run, again=False))

        def payload(rendezvous: Rendezvous) -> bytes:
            job = RecordJob(
                case=case,
                rendezvous=rendezvous,
                layout=run.layout,
                description=self._description,
                has_data=self._data_fd is not None,
                has_baseline=again,
            )
            return msgspec.msgpack.encode(job)

        def on_progress(rank: int, progress: Progress) -> None:
            if rank == 0:
                again_text = "rerun, " if again else ""
                at = f"step {progress.step + 1}/{case.steps}, {progress.phase}"
                self._listener.progress(case, again_text + at)

        return start_world(
            self._pool,
            target=RECORD,
            backend=case.backend,
            size=case.world,
            payload=payload,
            fds=fds,
            deadline_s=case.deadline_s,
            on_progress=on_progress,
        )

    def _tick_world(self) -> None:
        if self._world is None:
            return
        world, run, again = self._world
        world.tick()
        if not world.over:
            return
        self._world = None
        run.worlds_left -= 1
        run.timings_s["rerun" if again else "world"] = time.monotonic() - world.begun
        unstarted = [c for c in world.children if c.spawn_error]
        outcomes = blame.outcomes(world.children, hung=world.hung)
        world.close()
        if unstarted:
            raise CannotRunError(
                f"{len(unstarted)} of {run.case.world} ranks could not be started "
                f"({unstarted[0].spawn_error}); use fewer ranks or raise the process limit"
            )
        refused = [c for c in world.children if c.raised and c.raised.exit_code == ExitCode.USAGE]
        if refused:  # what cannot be adapted may show only when it is called
            raise error_of(refused[0])
        if again:
            run.rerun_outcomes = outcomes
        else:
            self._first_world_over(run, outcomes, succeeded=world.succeeded)
        self._judge_whole_run_if_due(run)

    def _first_world_over(self, run: CaseRun, outcomes: list[Outcome], *, succeeded: bool) -> None:
        run.outcomes = outcomes
        self._plan_step_judges(run)
        if not succeeded:
            run.worlds_left = 0
        elif run.case.rerun:
            self._worlds.appendleft((run, True))

    def _plan_step_judges(self, run: CaseRun) -> None:
        with mmap.mmap(run.trace_fd, run.layout.index_bytes, prot=mmap.PROT_READ) as index:
            written = steps_written(index, run.layout)
        planned = [(p.check, p.layer) for p in run.planned if p.scope == "step"]
        groups = [planned]
        if run.timings_s.get("world", 0.0) > _LONG_WORLD_S:
            # The two references, of like cost, apart; the longer part (it also runs the batch
            # without ghosts) first, so that the cores finish together.
            whole = [pair for pair in planned if pair[1] in FULL_BATCH_LAYERS]
            groups = [whole, [pair for pair in planned if pair not in whole]]
        for group in filter(None, groups):
            for steps in self._shares(run, written):
                self._judgings.append(_Judging(run, steps, tuple(group), whole_run=False))
                run.judges_left += 1

    def _shares(self, run: CaseRun, steps: int) -> list[tuple[int, ...]]:
        """Steps per judge. The lattice trains on from its own beginning, so it is not shared; a
        cell is judged sooner than a judge is started. A short world is judged beside its rerun, in
        time, by fewer: to start one takes the cores from those ranks.
        """
        if steps == 0:
            return []
        if "lattice" in run.case.layers or run.case.workload in CELLS:
            return [tuple(range(steps))]
        judges = min(steps, self._most_judges)
        if "world" in run.timings_s:
            busy_s = run.timings_s["world"] * min(run.case.world, self._cores)
            judges = min(judges, 1 + int(busy_s / _JUDGE_PER_RANK_S))
        bounds = [steps * k // judges for k in range(judges + 1)]
        return [tuple(range(a, b)) for a, b in pairwise(bounds)]

    def _judge_whole_run_if_due(self, run: CaseRun) -> None:
        if run.worlds_left:
            return
        planned = tuple((p.check, p.layer) for p in run.planned if p.scope == "run")
        self._judgings.append(_Judging(run, (), planned, whole_run=True))
        run.judges_left += 1

    def _start_judge(self, judging: _Judging) -> World:
        run = judging.run
        if judging.closer_look:
            return self._start_closer_look(run)
        has_rerun = judging.whole_run and run.rerun_fd >= 0
        fds = [run.trace_fd]
        fds += [self._data_fd] if self._data_fd is not None else []
        fds += [run.rerun_fd] if has_rerun else []
        job = JudgeJob(
            case=run.case,
            contract=run.contract,
            layout=run.layout,
            description=self._description,
            steps=judging.steps,
            planned=judging.planned,
            has_data=self._data_fd is not None,
            has_rerun=has_rerun,
        )
        payload = msgspec.msgpack.encode(job)
        return start_job(
            self._pool, target=JUDGE, payload=payload, fds=fds, deadline_s=_JUDGE_DEADLINE_S
        )

    def _start_closer_look(self, run: CaseRun) -> World:
        fds = [run.trace_fd] + ([self._data_fd] if self._data_fd is not None else [])
        job = ObserveJob(
            case=run.case,
            contract=run.contract,
            layout=run.layout,
            description=self._description,
            steps=diagnosis.steps_to_look_at(run.results),
            failed=tuple((r.check, r.layer) for r in run.results if r.verdict == "fail"),
            has_data=self._data_fd is not None,
            draws_random_numbers=run.facts.draws_random_numbers,
            takes_loss=run.facts.takes_loss,
            update_step=diagnosis.step_of_update(run.results),
        )
        payload = msgspec.msgpack.encode(job)
        return start_job(
            self._pool, target=OBSERVE, payload=payload, fds=fds, deadline_s=_JUDGE_DEADLINE_S
        )

    def _tick_judges(self) -> None:
        for entry in list(self._judges):
            world, judging = entry
            world.tick()
            if not world.over:
                continue
            self._judges.remove(entry)
            run = judging.run
            spent = time.monotonic() - world.begun
            what = "closer look" if judging.closer_look else "judge"
            run.timings_s[what] = run.timings_s.get(what, 0.0) + spent
            if judging.closer_look:
                run.seen = self._seen(world, run)
            else:
                run.results += self._judged(world, judging)
                self._listener.progress(run.case, f"judged {judging.steps or 'the whole run'}")
            world.close()
            run.judges_left -= 1
            if run.judges_left == 0 and run.worlds_left == 0 and not self._looks_closer(run):
                run.finished = True
                self._on_finished(run)
                run.close()
                self._listener.finished(run.case)

    def _looks_closer(self, run: CaseRun) -> bool:
        """Whether a case that is judged goes on to be diagnosed: once, and only if it failed."""
        if run.seen is not None or not diagnosis.worth_a_look(run.results):
            return False
        self._judgings.append(_Judging(run, (), (), whole_run=True, closer_look=True))
        run.judges_left += 1
        return True

    @staticmethod
    def _seen(world: World, run: CaseRun) -> Facts:
        if world.succeeded:
            return msgspec.msgpack.decode(world.results[0], type=Facts)
        return Facts(world=run.case.world, trouble=str(error_of(world.children[0])))

    @staticmethod
    def _judged(world: World, judging: _Judging) -> list[CheckResult]:
        if world.succeeded:
            return msgspec.msgpack.decode(world.results[0], type=list[CheckResult])
        reason = f"the check itself failed: {error_of(world.children[0])}"
        return [
            CheckResult(check=check, layer=layer, verdict="unknown", reason=reason)
            for check, layer in judging.planned
        ]

    def _end_everything(self) -> None:
        worlds = [world for world, _ in self._judges]
        if self._world is not None:
            worlds.append(self._world[0])
        end_now(self._pool, *worlds)


def _shared_trace(run: CaseRun, *, again: bool) -> Shared:
    return Shared(
        fd=run.rerun_fd if again else run.trace_fd,
        kind="trace",
        key=f"{run.case.id}, {'rerun' if again else 'first run'}",
        size=run.layout.total_bytes,
        regions=run.layout.regions_of,
    )


def _new_trace(layout: TraceLayout) -> int:
    """Shared memory for a trace; it takes up no more than what is written to it."""
    fd = os.memfd_create("distcheck-trace")
    try:
        os.ftruncate(fd, layout.total_bytes)
    except OSError as error:
        os.close(fd)
        raise CannotRunError(
            f"a trace of {layout.total_bytes / 2**30:.1f} GiB cannot be laid out in shared memory: "
            f"{error.strerror} (ulimit -f?)"
        ) from error
    return fd
