"""Schedules planned cases on a pool: one world of ranks at a time, and judges concurrently.

A case is a sequence of worlds (processes that train and record a trace in memory) and judges
(processes that compare a trace with references). `Session._whole_case` is this sequence:

- Several judges share the steps of a case: each judges a group of checks (`groups_of_checks`) and a
  block of steps (`steps_of_judges`). The case's rerun goes to the front of the queue of worlds.
- One more judge makes the whole-run checks. If there is no rerun to compare, and the case's last
  judge has not started, that judge makes them instead.
- A rerun in separate interpreters that differed is bisected by further worlds
  (`RerunBisection`), each compared with the first trace.
- A failure is measured in detail (`ObserveRequest`, the closer look).

Invariants:
- Only one world runs at a time, since its ranks fill the cores. Judges share the cores with it.
- No world starts while `_most_judges` judges wait: this bounds the traces in memory.
- A further judge starts only if twice its memory is available; the first always starts.
- A rerun in separate interpreters waits until these are ready or known not to come; first worlds of
  other cases run in the meantime.
- After a hang, other cases of the same strategy and world are not run: each could cost a deadline.
  After `end_after` nothing is judged any more.
- An exception ends all processes. Traces are closed, except of cases that `on_finished` keeps by
  returning None.

A worked example: case A, a strategy with 2 ranks and 3 steps, and case B, the same with a different
workload, on 4 cores. A's first world takes 0.6 s, that is 1.2 s of two cores, so two judges share
its steps:

    time   world                  judges
    0.0 s  A first, ranks 0 and 1
    0.6 s  A rerun, ranks 0 and 1 A step 0; A steps 1 and 2
    1.2 s  B first, ranks 0 and 1 A steps 1 and 2; A whole run (data, rerun)
    1.5 s  B first, ranks 0 and 1 none: A is finished, its traces are closed

If the strategy iterates over a set, the rerun's hash seed changes the order of a sum, and A fails
`rerun` at 1.5 s. Further worlds of A follow: a repeat of the first world finds no difference, one
with only the factor `interpreters` differs, and both are repeated twice with the same result. The
conclusion is that the bits depend on process state. If A fails `gradients` instead, it gets a
closer look; B, if it fails first in the same check and step, then takes over A's causes, if these
were found.
"""

import mmap
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import msgspec

from distcheck.errors import AnswerError, CannotRunError, DistcheckError, InternalError
from distcheck.errors.masking import masked
from distcheck.judge import diagnosis
from distcheck.judge.checks.merging import earliest_failure
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.judge.jobs import JUDGE, OBSERVE, JudgeRequest, ObserveRequest
from distcheck.judge.rerun_bisection import RerunBisection
from distcheck.machine.resources import available_bytes, cores
from distcheck.plan.case_remarks import why_not_judged_after_failure, why_not_run_after_hang
from distcheck.plan.cells_to_run import counts_only_if_finished
from distcheck.recordings.traces.layout import steps_written
from distcheck.records import Case, CheckResult, PlannedCheck
from distcheck.records.layers import FULL_BATCH_LAYERS
from distcheck.training.jobs import RECORD, RecordRequest
from distcheck.verification import limits, own_code
from distcheck.verification.case_run import CaseRun, WorldName, is_separate, new_trace
from distcheck.verification.preparation import SharedDataset
from distcheck.worlds import root_cause
from distcheck.worlds.launch import (
    Ranks,
    job_result,
    kill_worlds,
    refusal_of,
    start_job,
    start_world,
)
from distcheck.worlds.messages import Progress
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.shares import Shared
from distcheck.worlds.surroundings import Surroundings
from distcheck.worlds.world import World

NOT_FINISHED = "skipped: this code does not handle parameters without a gradient (it need not)"


class Listener(Protocol):
    """Interface for progress as it happens; a subclass overrides the methods that it needs."""

    def preparing(self, what: str) -> None:
        return

    def planned(self, cases: Sequence[Case], *, before: int = 0) -> None:
        """Receive the cases to run. An earlier start of the run judged `before` further cases."""
        return

    def progress(self, case: Case, what: str) -> None:
        return

    def finished(self, case: Case, verdict: str) -> None:
        return


class SilentListener(Listener):
    """A listener that shows nothing."""


def step_in_words(step: int, steps: int, phase: str) -> str:
    """Return a rank's position: "step 2 of 3, sync", or "all steps done, sync"."""
    return f"step {step + 1} of {steps}, {phase}" if step < steps else f"all steps done, {phase}"


def steps_in_words(steps: Sequence[int]) -> str:
    """Return steps, counted from 1: "step 3", "steps 1 to 4"; "the whole run" for none."""
    numbers = [step + 1 for step in sorted(steps)]
    if not numbers:
        return "the whole run"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"steps {', '.join(map(str, numbers))}"


_LONG_WORLD_S = 2.0  # Heuristic: beyond this, another judging process costs nothing
_JUDGE_PER_RANK_S = 1.0  # Heuristic: seconds of a core, which the world can have used
_JUDGE_DEADLINE_S = 600.0  # Heuristic: without any progress; a judge reports what it begins


@dataclass(frozen=True)
class JudgeTask:
    """A request to judge one world.

    what  the first world, the rerun in its place, or a further world, whose bits are compared
    """

    run: CaseRun
    request: JudgeRequest | ObserveRequest
    what: WorldName = "world"


def steps_of_judges(run: CaseRun, steps: int, most: int, cores: int) -> list[tuple[int, ...]]:
    """Return the steps of each judge, for at most `most` judges.

    One judge gets all steps in three cases: workload `exact`, which trains from its start; events
    of a run that need all steps; and a GPU, where a step takes less time than starting a process. A
    short world gets fewer judges: starting one takes cores from the ranks of the rerun.
    """
    if steps == 0:
        return []
    is_whole = "exact" in run.case.layers or run.facts.must_happen
    if is_whole or run.case.judging_device != "cpu":
        return [tuple(range(steps))]
    judges = min(steps, most)
    if "world" in run.timings_s:
        busy_s = run.timings_s["world"] * min(run.case.world, cores)
        judges = min(judges, 1 + int(busy_s / _JUDGE_PER_RANK_S))
    bounds = [steps * k // judges for k in range(judges + 1)]
    return [tuple(range(a, b)) for a, b in pairwise(bounds)]


def planned_checks(run: CaseRun, scope: str) -> tuple[PlannedCheck, ...]:
    return tuple(planned for planned in run.planned if planned.scope == scope)


def groups_of_checks(run: CaseRun) -> list[tuple[PlannedCheck, ...]]:
    """Return the checks of each judge of a block of steps. After a long world, the two references,
    which take similar time, are judged separately. The longer one (which also runs the batch
    without ghosts) starts first, so that the cores finish together.
    """
    planned = planned_checks(run, "step")
    if run.timings_s.get("world", 0.0) <= _LONG_WORLD_S:
        return [planned]
    whole = tuple(one for one in planned if one.layer in FULL_BATCH_LAYERS)
    return [group for group in (whole, tuple(p for p in planned if p not in whole)) if group]


def start_judging(pool: Pool, task: JudgeTask, data: SharedDataset) -> World:
    run, request = task.run, task.request
    start = partial(start_job, pool, deadline_s=_JUDGE_DEADLINE_S, stopped_s=run.case.deadline_s)
    fds = {"trace": run.traces["world"], **data.fds}
    if isinstance(request, ObserveRequest):
        return start(OBSERVE, request, fds)
    other: WorldName = "further" if task.what == "further" else "rerun"
    if (not request.steps or request.of_rerun) and other in run.traces:
        fds["rerun"] = run.traces[other]
    return start(JUDGE, request, fds)


def observed_measurements(world: World, run: CaseRun) -> Measurements:
    """Return the measurements of a closer look. If it failed, `trouble` is the reason."""
    try:
        return OBSERVE.decode(job_result(world))
    except DistcheckError as error:
        return Measurements(world=run.case.world, trouble=str(error))


def judged_results(world: World, request: JudgeRequest) -> list[CheckResult]:
    """Return a judge's results. If it failed, each planned check is unknown."""
    try:
        return JUDGE.decode(job_result(world))
    except DistcheckError as raised:
        error = raised
    reason = f"the check itself raised an error: {error}"
    defect = masked(error.traceback) if isinstance(error, InternalError) else ""
    return [
        CheckResult(check=p.check, layer=p.layer, verdict="unknown", reason=reason, defect=defect)
        for p in (*request.planned, *request.of_run)
    ]


class DiagnosisQueue:
    """Selects failed cases for a closer look: one of those that fail in the same way.

    A closer look costs as much as a case. Once a case is explained, a case of the same code whose
    first failed check and step are the same counts as the same failure, and its report refers to
    the explained case. During a closer look, other failed cases of the same code wait for the
    result.
    """

    def __init__(self) -> None:
        self._looking: dict[object, CaseRun] = {}  # by code
        self._waiting: list[CaseRun] = []
        self._explained: list[CaseRun] = []

    def explained(self, run: CaseRun) -> bool:
        """Return True if a case fails like an explained case, and set that as its `like`."""
        alike = (
            r
            for r in self._explained
            if (_same_key(r), _fail_key(r)) == (_same_key(run), _fail_key(run))
        )
        run.like = next(alike, None)
        return run.like is not None

    def waits(self, run: CaseRun) -> bool:
        """Return True if a case must wait for one of the same code, False for a closer look."""
        if self._looking.setdefault(_same_key(run), run) is run:
            return False
        self._waiting.append(run)
        return True

    def release_waiting(self, run: CaseRun) -> Iterator[CaseRun]:
        """Take in a measured case; yield the cases that waited for it."""
        self._looking.pop(_same_key(run), None)
        found = diagnosis.diagnose((), run.results, run.seen, accept=run.case.accept)
        if all(one.cause != "unexplained" for one in found):
            self._explained.append(run)
        freed = [other for other in self._waiting if _same_key(other) == _same_key(run)]
        self._waiting = [other for other in self._waiting if other not in freed]
        yield from freed


def _same_key(run: CaseRun) -> object:
    """Return a key of cases that may share a cause: code, call, world, and equal shards."""
    case = run.case
    unequal = bool(case.batch % len(case.with_data))
    return case.sibling_key, case.adaptation, case.loss, case.accept, unequal


def _fail_key(run: CaseRun) -> object:
    """Return how a case fails: the first failing check, its step, and if replicas differ."""
    failed = [r for r in run.results if r.verdict == "fail" and r.check not in ("rerun", "outcome")]
    first = earliest_failure(failed)
    at = None if first is None or first.first is None else (first.check, first.first.step)
    return at, any(r.check == "agreement" for r in failed)


_MOST_JUDGES = 16
_MOST_JUDGES_ON_GPU = 2  # Heuristic: each holds a CUDA context and a model there
_SAID_OF = {"world": "", "rerun": "rerun, ", "further": "isolating the rerun difference, "}
# Takes a finished case, and returns its verdict; after None its traces stay open.
OnFinished = Callable[[CaseRun], str | None]
_Awaited = tuple[CaseRun, WorldName]  # a world that is queued
# The stages of a case. They yield the world that they wait for, and then receive it, or None to
# wait until none of the case's judges are left.
_Stages = Generator[WorldName | None, Any, None]


class Session:
    """Runs cases to their end; calls `on_finished` with each case when it is done."""

    def __init__(self, pool: Pool, data: SharedDataset, listener: Listener) -> None:
        self.pool, self.data, self.listener = pool, data, listener
        self._stages: dict[CaseRun, _Stages] = {}  # of cases that are not finished
        self._worlds: deque[_Awaited] = deque()
        self._tasks: deque[JudgeTask] = deque()
        self._world: tuple[World, _Awaited] | None = None
        self._judges: list[tuple[World, JudgeTask]] = []
        self._looks = DiagnosisQueue()
        self.after_hang = False  # True to run other cases of a strategy that hung
        self._last: Case | None = None  # the last case that is judged
        self._on_finished: OnFinished = lambda run: "unknown"
        # Twice the cores, so that the last few share them instead of leaving one idle.
        self._cores = cores()
        self._most_judges = min(2 * self._cores, _MOST_JUDGES)

    def run(self, runs: Sequence[CaseRun], *, on_finished: OnFinished) -> None:
        """Block until every case is finished. If interrupted, end everything that was started."""
        self._on_finished = on_finished
        for run in runs:
            run.finished = False
            self._begin_case(run, self._whole_case(run))
        self._until_finished(runs)

    def rejudge(self, run: CaseRun, *, on_finished: OnFinished) -> None:
        """Judge a case whose traces exist, and close them. Starts no rank."""
        self._on_finished = on_finished
        with closing(run):
            self._begin_case(run, self._judge_traces(run))
            self._until_finished([run])

    def _whole_case(self, run: CaseRun) -> _Stages:
        world: World = yield "world"
        run.outcomes = tuple(root_cause.rank_outcomes(world.children, hung=world.hung))
        run.notes += tuple(f"{one.name}: {one.text}" for c in world.children for one in c.remarks)
        with suppress(AnswerError, IndexError):  # the code under test may have written it
            run.ledger = RECORD.decode(world.results[0])[0] if world.succeeded else None
        self._queue_step_judges(run)
        if world.succeeded and run.case.rerun:
            world = yield "rerun"
            run.rerun_outcomes = tuple(root_cause.rank_outcomes(world.children, hung=world.hung))
        if world.hung:
            self._leave_out_others(run)
        self._queue_judge_of_run(run)
        yield None
        if run.surroundings.factors and run.rerun_differed:
            yield from self._bisect_rerun(run)
        yield from self._look_closer(run)

    def _judge_traces(self, run: CaseRun) -> _Stages:
        self._queue_step_judges(run)
        self._queue_judge_of_run(run)
        yield None
        yield from self._look_closer(run)

    def _bisect_rerun(self, run: CaseRun) -> _Stages:
        apart = run.taking_apart = RerunBisection(run.surroundings)
        while apart.next is not None:
            world: World = yield "further"
            if not world.succeeded:
                apart.note(True)
                continue
            planned = tuple(p for p in run.planned if p.check == "rerun")
            self._queue_judge(run, (), planned, "further")
            yield None
        assert apart.conclusion is not None
        found = apart.conclusion
        if found.depends and found.factors == ("nodes",):
            steps = tuple(range(run.case.steps))
            self._queue_judge(run, steps, planned_checks(run, "step"), "rerun")
            yield None
        run.conclude(found)

    def _look_closer(self, run: CaseRun) -> _Stages:
        """Measure a failed case in detail, unless another case explains it."""
        while run.seen is None and diagnosis.needs_diagnosis(run.results):
            if self._looks.explained(run):
                return
            if self._looks.waits(run):
                run.judges_left += 1  # of the other case
            else:
                look = ObserveRequest(
                    **self._of_case(run),
                    steps=diagnosis.steps_to_diagnose(run.results),
                    failed=tuple((r.check, r.layer) for r in run.results if r.verdict == "fail"),
                    update_step=diagnosis.step_of_update(run.results),
                )
                self._queue(JudgeTask(run, look))
            yield None

    def _begin_case(self, run: CaseRun, stages: _Stages) -> None:
        run.judges_left = 0
        self._stages[run] = stages
        self._continue_case(run)

    def _continue_case(self, run: CaseRun, world: World | None = None) -> None:
        """Continue a case after the world that it waited for, or else after all its judges."""
        try:
            run.awaited = self._stages[run].send(world)
        except StopIteration:
            self._finish(run)
            return
        if run.awaited == "world":
            self._worlds.append((run, run.awaited))
        elif run.awaited is not None:
            self._worlds.appendleft((run, run.awaited))

    def _judge_over(self, run: CaseRun) -> None:
        run.judges_left -= 1
        if not run.judges_left and run.awaited is None and run in self._stages:
            self._continue_case(run)

    def _of_case(self, run: CaseRun) -> dict[str, Any]:
        about = {"case": run.case, "facts": run.facts, "layout": run.layout}
        return {**about, "description": self.data.description}

    def _queue_judge(
        self,
        run: CaseRun,
        steps: tuple[int, ...],
        planned: tuple[PlannedCheck, ...],
        what: WorldName = "world",
    ) -> None:
        """Queue a judge of some steps; without steps, of checks of the whole run."""
        request = JudgeRequest(
            **self._of_case(run), steps=steps, planned=planned, of_rerun=what == "rerun"
        )
        self._queue(JudgeTask(run, request, what))

    def _queue(self, task: JudgeTask) -> None:
        self._tasks.append(task)
        task.run.judges_left += 1

    def _until_finished(self, runs: Sequence[CaseRun]) -> None:
        try:
            while not all(run.finished for run in runs):
                self._start_what_fits()
                self.pool.pump(0.05)
                self._tick_world()
                self._tick_judges()
                if self._last is not None:
                    self._leave_out_rest(runs, why_not_judged_after_failure(self._last))
        except BaseException:
            self._end_everything()
            raise
        finally:
            for run in (run for run in runs if not run.kept):
                run.close()

    def set_aside(self, strategy: str | None = None) -> list[CaseRun]:
        """Remove and return cases, of one strategy or all, that may still run later."""
        found = [
            one
            for one in self._worlds
            if one[1] == "world" and strategy in (None, one[0].case.strategy)
        ]
        for one in found:
            self._worlds.remove(one)
            self._drop(one[0])
        return [run for run, _ in found]

    def _drop(self, run: CaseRun) -> None:
        """End the stages of a case."""
        self._stages.pop(run, None)
        run.finished = True

    def _start_what_fits(self) -> None:
        if self._world is None and len(self._tasks) < self._most_judges:
            awaited = next((one for one in self._worlds if self._may_start(*one)), None)
            if awaited is not None:
                self._worlds.remove(awaited)
                self._world = (self._start_ranks(*awaited), awaited)
        while self._tasks and self._has_room_for(self._tasks[0]):
            task = self._tasks.popleft()
            self._judges.append((start_judging(self.pool, task, self.data), task))

    def _may_start(self, run: CaseRun, what: WorldName) -> bool:
        """Return True if the interpreters for a rerun are ready, or known not to come."""
        if what != "rerun" or not is_separate(run.case):
            return True
        return self.pool.interpreters_ready or bool(self.pool.why_no_interpreters())

    def _has_room_for(self, task: JudgeTask) -> bool:
        """Return True if another judge may start: there are enough processes and memory."""
        if not self._judges:
            return True
        if task.run.case.judging_device != "cpu" and len(self._judges) >= _MOST_JUDGES_ON_GPU:
            return False
        needed = limits.reference_bytes(task.run.case, task.run.facts, task.run.layout)
        return len(self._judges) < self._most_judges and available_bytes() > 2 * needed

    def _start_ranks(self, run: CaseRun, what: WorldName) -> World:
        case, surroundings = run.case, Surroundings(schedule=run.case.schedule or "")
        if what == "rerun":
            run.decide_surroundings(self.pool.why_no_interpreters())
            surroundings = run.surroundings
        elif what == "further":
            assert run.taking_apart is not None
            assert run.taking_apart.next is not None
            surroundings = run.taking_apart.next
        run.keep(new_trace(run.layout), what)
        again = what != "world"
        fds = {"trace": run.shared_trace(what)}
        fds |= {name: Shared(fd=fd, kind="data") for name, fd in self.data.fds.items()}
        if again:
            fds["baseline"] = run.shared_trace("world")
        delays = surroundings.delays(case.world) if again else case.delays

        def request(rendezvous: Rendezvous) -> RecordRequest:
            return RecordRequest(
                case=case,
                rendezvous=rendezvous,
                layout=run.layout,
                description=self.data.description,
                delays=delays,
                memory_seed=surroundings.memory_seed(rendezvous.rank),
            )

        def on_progress(rank: int, progress: Progress) -> None:
            if rank == 0:
                at = step_in_words(progress.step, case.steps, progress.phase)
                self.listener.progress(case, _SAID_OF[what] + at)

        ranks = Ranks(
            job=RECORD,
            backend=case.backend,
            size=case.world,
            request=request,
            deadline_s=run.deadline_s(what),
            surroundings=surroundings,
        )
        return start_world(self.pool, ranks, fds=fds, on_progress=on_progress)

    def _tick_world(self) -> None:
        if self._world is None:
            return
        world, (run, what) = self._world
        world.tick()
        if not world.over:
            return
        self._world = None
        spent = time.monotonic() - world.begun
        run.timings_s[what] = run.timings_s.get(what, 0.0) + spent
        unstarted = [c for c in world.children if c.spawn_error]
        world.close()
        if unstarted:
            raise CannotRunError(
                f"{len(unstarted)} of {run.case.world} ranks could not be started "
                f"({unstarted[0].spawn_error}); use fewer ranks or raise the process limit"
            )
        run.refused = refusal_of(world)
        if run.refused is not None:  # an unsupported call may only show at run time
            self._finish(run)
            return
        if what != "further" and run.defect is None:
            run.defect = own_code.defect_in_rank(run.case, world.children, hung=world.hung)
        self._continue_case(run, world)

    def _leave_out_others(self, hung: CaseRun) -> None:
        """End the strategy's other cases in this world: each could cost a deadline."""
        case = hung.case
        if self.after_hang or counts_only_if_finished(case):
            return
        for run, what in list(self._worlds):
            if what != "world" or run is hung or run.case.sibling_key != case.sibling_key:
                continue
            self._worlds.remove((run, what))
            run.not_run = why_not_run_after_hang(run.case, case)
            self.listener.progress(run.case, "not run after a hang")
            self._finish(run)

    def end_after(self, case: Case) -> None:
        self._last = self._last or case

    def _leave_out_rest(self, runs: Sequence[CaseRun], why: str) -> None:
        """End every unfinished case, with its processes."""
        self._end_everything()
        self._worlds.clear()
        self._tasks.clear()
        self._judges.clear()
        self._world = None
        for run in runs:
            if run.finished:
                continue
            run.not_run, run.results, run.outcomes, run.rerun_outcomes = why, [], (), ()
            self._finish(run)

    def _queue_step_judges(self, run: CaseRun) -> None:
        with mmap.mmap(run.traces["world"], run.layout.index_bytes, prot=mmap.PROT_READ) as index:
            written = steps_written(index, run.layout)
        for group in groups_of_checks(run):
            for steps in steps_of_judges(run, written, self._most_judges, self._cores):
                self._queue_judge(run, steps, group)

    def _queue_judge_of_run(self, run: CaseRun) -> None:
        planned = planned_checks(run, "run")
        last = self._tasks[-1] if self._tasks else None
        if last is not None and last.run is run and "rerun" not in run.traces:
            # A process of its own costs more than the comparison.
            request = msgspec.structs.replace(last.request, of_run=planned)
            self._tasks[-1] = replace(last, request=request)
            return
        self._queue_judge(run, (), planned)

    def _tick_judges(self) -> None:
        for entry in list(self._judges):
            world, task = entry
            world.tick()
            if not world.over:
                continue
            self._judges.remove(entry)
            run, request = task.run, task.request
            spent = time.monotonic() - world.begun
            diagnoses = isinstance(request, ObserveRequest)
            what = "closer look" if diagnoses else "judge"
            run.timings_s[what] = run.timings_s.get(what, 0.0) + spent
            if isinstance(request, ObserveRequest):
                run.seen = observed_measurements(world, run)
            else:
                self._take_results(task, judged_results(world, request))
            world.close()
            self._judge_over(run)
            for other in self._looks.release_waiting(run) if diagnoses else ():
                self._judge_over(other)

    def _take_results(self, task: JudgeTask, results: list[CheckResult]) -> None:
        run = task.run
        if task.what == "world":
            run.results += results
            self.listener.progress(run.case, f"judged {steps_in_words(task.request.steps)}")
        elif task.what == "rerun":
            run.of_rerun = results
        else:
            assert run.taking_apart is not None
            run.taking_apart.note(any(result.verdict == "fail" for result in results))

    def _finish(self, run: CaseRun) -> None:
        self._drop(run)
        verdict = self._on_finished(run)
        run.kept = verdict is None
        if verdict is not None:
            run.close()
            self.listener.finished(run.case, verdict)

    def _end_everything(self) -> None:
        worlds = [world for world, _ in self._judges]
        if self._world is not None:
            worlds.append(self._world[0])
        kill_worlds(self.pool, *worlds)
