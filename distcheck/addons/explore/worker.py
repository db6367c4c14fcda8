"""Jobs of the persistent processes: one trains cases as a rank, the other judges them.

The processes run the same code as the ranks and the judge of `distcheck verify`, but serve many
cases and keep their process group. State that one case leaves behind may therefore affect the next,
so the caller confirms a failure in new ranks.
"""

import msgspec
import torch

from distcheck.addons.explore.messages import (
    JUDGE,
    SERVE,
    TRACE_BYTES,
    TRACES,
    JudgeCase,
    TrainCase,
)
from distcheck.judge.job import judge_trace
from distcheck.judge.jobs import JudgeRequest
from distcheck.machine import devices, seeds
from distcheck.plan import cases as plan
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.recordings.traces.reader import TraceReader
from distcheck.recordings.traces.writer import TraceWriter
from distcheck.records import Case, ModelLayout, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.training.building import Ingredients, open_ingredients
from distcheck.training.delays import RankDelays
from distcheck.training.epoch_positions import shard_sizes
from distcheck.training.loading import load_strategy
from distcheck.training.loop import Loop
from distcheck.training.recorder import LoopObserver, TraceRecorder
from distcheck.verification.case_run import CaseRun
from distcheck.verification.inspection import inspect_workload
from distcheck.verification.verdicts import build_case_report
from distcheck.workloads.generated import describe
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import Rendezvous, join
from distcheck.worlds.worker_pool import requests


@SERVE.does
def serve_rank(meeting: Rendezvous, fds: Descriptors, reporter: Reporter) -> None:
    """Train cases as a persistent rank until the front end closes the channel."""
    traces = [fds[name] for name in TRACES]
    seeds.pin_determinism()
    device = devices.enter("cpu", 0)
    late = RankDelays()
    late.install()
    join(meeting, fds[STORE])
    for number, turn in enumerate(requests(fds, TrainCase), 1):
        reporter.progress(number, turn.case.id)
        torch.set_default_dtype(torch.float32)
        _train(turn, meeting.rank, late, traces[2 * turn.pair :], device)
        reporter.say(b"")


def _train(
    turn: TrainCase, rank: int, late: RankDelays, traces: list[int], device: torch.device
) -> None:
    case = turn.case
    ingredients = open_ingredients(case, b"", None, device)
    seeds.pin_default_dtype(case.dtype)
    mine = [delay for delay in case.delays if delay.rank == rank]
    late.begin([] if turn.again else mine)
    strategy = load_strategy(case.strategy, case.adaptation)
    observer: LoopObserver = LoopObserver()
    if not turn.bare:
        first, second = traces[:2]
        fds = (second, first) if turn.again else (first, None)
        observer = _Recorder(ingredients, rank, fds)
    # Reporting every phase to the front end would cost more than the phases; if a rank hangs, fresh
    # ranks will show the phase.
    progress = late.watching(lambda step, phase: None)
    loop = Loop(ingredients, strategy, observer, rank=rank, progress=progress)
    for step in range(case.steps):
        loop.step(step)
    loop.close()


class _Recorder(TraceRecorder):
    """Records a case with a layout that is derived from the trained model. The judge determines the
    layout as `distcheck verify` does, from a separate model and optimizer step.
    """

    def __init__(self, ingredients: Ingredients, rank: int, fds: tuple[int, int | None]) -> None:
        self._ingredients, self._rank, self._fds = ingredients, rank, fds

    def attach(self, model: torch.nn.Module) -> None:
        """Create the trace writer. Called before the first step is recorded."""
        ingredients = self._ingredients
        layout = _layout(ingredients, describe(ingredients.case.workload, model))
        writer = TraceWriter(self._fds[0], layout, self._rank, self._fds[1])
        super().__init__(writer, layout, ingredients.device)
        super().attach(model)


def _layout(ingredients: Ingredients, model: ModelLayout) -> TraceLayout:
    case = ingredients.case
    sizes = _shard_sizes(case, ingredients)
    most = max(map(max, sizes))
    layout = TraceLayout(world=case.world, steps=case.steps, max_shard=most, model=model)
    assert layout.total_bytes <= TRACE_BYTES, "explored models are small"
    return layout


def _shard_sizes(case: Case, ingredients: Ingredients) -> list[list[int]]:
    size = ingredients.samples.size(train=True)
    return shard_sizes(case.steps, size=size, batch=case.batch, world=case.world)


@JUDGE.does
def serve_judge(nothing: bytes, fds: Descriptors, reporter: Reporter) -> None:
    """Judge cases in a persistent process until the front end closes the channel."""
    traces = [fds[name] for name in TRACES]
    seeds.pin_determinism()
    for number, judge_case in enumerate(requests(fds, JudgeCase), 1):
        reporter.progress(number, judge_case.case.id)
        torch.set_default_dtype(torch.float32)
        runs = 2 if judge_case.case.rerun else 1
        reporter.say(_judge(judge_case, traces[2 * judge_case.pair :][:runs]))


def _judge(judge_case: JudgeCase, fds: list[int]) -> bytes:
    case = judge_case.case
    ingredients = open_ingredients(case, b"", None)
    seeds.pin_default_dtype(case.dtype)
    facts = msgspec.structs.replace(inspect_workload(ingredients), contract=judge_case.contract)
    sizes, layout = _shard_sizes(case, ingredients), _layout(ingredients, facts.model)
    planned = plan.plan_checks(
        case, facts, sizes=sizes, calibration_failure=judge_case.calibration_failure
    )
    request = JudgeRequest(
        case=case,
        facts=facts,
        layout=layout,
        description=b"",
        steps=tuple(range(case.steps)),
        planned=tuple(p for p in planned if p.scope != "front"),
    )
    trace = TraceReader(fds[0], layout)
    rerun = TraceReader(fds[1], layout, baseline=trace) if len(fds) > 1 else None
    outcomes = [Outcome(rank=rank, outcome=RankEnd.FINISHED) for rank in range(case.world)]
    run = CaseRun(
        case=case,
        facts=facts,
        planned=tuple(planned),
        layout=layout,
        outcomes=tuple(outcomes),
        results=judge_trace(request, ingredients, trace, rerun),
    )
    return msgspec.msgpack.encode(build_case_report(run, replay=""))
