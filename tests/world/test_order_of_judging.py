"""What a judge says of a step depends on that step alone: not on which steps it judges besides, nor
on their order, nor on which check was made before.
"""

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import distcheck
from distcheck.judge import checks
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.merging import merge_results
from distcheck.judge.checks.tally import Tally
from distcheck.judge.job import evidence_of, expect_step
from distcheck.judge.jobs import JUDGE, JudgeRequest
from distcheck.judge.oracles.references import References
from distcheck.machine import seeds
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import CheckResult
from distcheck.store.run_folder import read_trace, saved_traces
from distcheck.training.building import open_ingredients
from distcheck.verification.case_run import CaseRun
from distcheck.verification.report_builder import restore_run
from distcheck.workloads.cells import CELLS
from distcheck.worlds.jobs import Descriptors, Job, Reporter
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool
from tests.world.test_kinks import AtAKink

STEPS = 6
OUT_OF_ORDER = Job(f"{__name__}:judge_out_of_order", JudgeRequest, list[CheckResult], ("trace",))


def a_little_off(model: torch.nn.Module, step: distcheck.Step) -> None:
    """Wrong from step 2 on: so little that some parameters are still within their bounds."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size
        if step.index >= 2:
            parameter.grad *= 1 + 2e-5


def rounds_on_the_way(model: torch.nn.Module, step: distcheck.Step) -> None:
    """Right, and not exact: a mean that runs along."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.div_(3))
        parameter.grad.mul_(3 / step.world_size)


class SeesOthersAtFirst(AtAKink):
    """At a kink in every step; in the first, a sample's gradient depends on the others, too."""

    class unit(AtAKink.unit):
        def __init__(self, features: int, classes: int) -> None:
            super().__init__(features, classes)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            flat = inputs.flatten(1)
            first = bool(self.steps == 0)
            self.steps += 1
            return super().forward(flat - 0.001 * flat.mean(0) if first else flat)


def judged(
    pool: Pool, run: CaseRun, parts: list[tuple[int, ...]],
    job: "Job[JudgeRequest, list[CheckResult]]" = JUDGE,
) -> list[CheckResult]:  # fmt: skip
    """Each part by a judge of its own; the results merged in the order of the steps."""
    planned = tuple(p for p in run.planned if p.scope == "step")
    found: list[tuple[int, list[CheckResult]]] = []
    for steps in parts:
        request = JudgeRequest(
            case=run.case, facts=run.facts, layout=run.layout, description=b"",
            steps=steps, planned=planned,
        )  # fmt: skip
        answer = run_job(pool, job, request, {"trace": run.traces["world"]})
        found.append((min(steps), answer))
    columns = zip(*[results for _, results in sorted(found)], strict=True)
    return [merge_results(column) for column in columns]


@OUT_OF_ORDER.does
def judge_out_of_order(
    job: JudgeRequest, fds: Descriptors, reporter: Reporter
) -> list[CheckResult]:
    """A job: steps in any order, with the same references; checks in any order, each by itself, and
    while one of them compares, nothing can train.
    """
    seeds.pin_determinism()
    ingredients = open_ingredients(job.case, b"", None)
    seeds.pin_default_dtype(job.case.dtype)
    references = References(ingredients, job.contract, TraceReader(fds["trace"], job.layout))
    evidence = evidence_of(job, references, None)
    steps, order = list(job.steps), random.Random(len(job.steps))
    pairs = [(p.check, p.layer) for p in job.planned]
    planned = [*pairs]
    parts: dict[tuple[str, str], dict[int, CheckResult]] = {pair: {} for pair in planned}
    kept: dict[tuple[str, str], dict[int, Expectation]] = {pair: {} for pair in planned}
    order.shuffle(steps)
    for step in steps:
        order.shuffle(planned)
        expected = expect_step(references, step, planned)
        order.shuffle(planned)
        for pair in planned:
            expectation = expected[pair]
            assert isinstance(expectation, Expectation), expectation
            kept[pair][step] = expectation
            if not over_steps(pair[0]):
                parts[pair][step] = compared(evidence, pair, [kept[pair][step]])
    for pair, of_steps in kept.items():
        if over_steps(pair[0]):
            parts[pair][0] = compared(
                evidence, pair, [found for _, found in sorted(of_steps.items())]
            )
    return [merge_results([part for _, part in sorted(parts[pair].items())]) for pair in pairs]


def over_steps(check: str) -> bool:
    return getattr(checks.load_check(check), "OVER_STEPS", False)


def compared(
    evidence: Evidence, pair: tuple[str, str], expectations: list[Expectation]
) -> CheckResult:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a check trains")

    tally, patch = Tally(*pair), pytest.MonkeyPatch()
    patch.setattr(torch.autograd, "backward", refuse)
    patch.setattr(torch.nn.Module, "__call__", refuse)
    patch.setattr(torch.optim.Optimizer, "__init__", refuse)
    try:
        seen = dataclasses.replace(evidence, expectations=tuple(expectations))
        checks.load_check(pair[0]).compare(seen, tally)
    finally:
        patch.undo()
    return tally.result()


def test_a_check_that_trains_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def trains(evidence: Evidence, tally: Tally) -> None:
        torch.nn.Linear(1, 1)(torch.ones(1)).backward()

    monkeypatch.setattr(checks, "load_check", lambda name: SimpleNamespace(compare=trains))
    nothing = Evidence(case=None, facts=None, trace=None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a check trains"):
        compared(nothing, ("loss", "-"), [])


def saved(
    pool: Pool, folder: Path, spec: str, workloads: list[str], *, batch: int,
    accept: str | None = None,
) -> Iterator[CaseRun]:  # fmt: skip
    """The cases of a run, with their traces; some of them may fail."""
    distcheck.verify(
        spec, world=2, workload=workloads, dtype="float32", batch=batch,
        steps=None if workloads[0] in CELLS else STEPS, accept=accept, separate=False, save=folder,
    )  # fmt: skip
    for trace in saved_traces(folder):
        fds = read_trace(pool, trace)
        yield restore_run(trace.saved, fds)
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("spec", "workload", "batch"),
    [
        pytest.param(f"{__name__}:a_little_off", "mlp", 24, marks=pytest.mark.sweep),
        pytest.param(f"{__name__}:rounds_on_the_way", "exact", 24, marks=pytest.mark.sweep),
        pytest.param("allreduce", "tests.world.test_kinks:AtAKink", 6, marks=pytest.mark.sweep),
        ("allreduce", f"{__name__}:SeesOthersAtFirst", 6),
    ],
)
def test_same_verdicts(pool: Pool, tmp_path: Path, spec: str, workload: str, batch: int) -> None:
    run = next(saved(pool, tmp_path / "run", spec, [workload], batch=batch))
    whole = tuple(range(STEPS))
    shuffled = list(whole)
    random.Random(1).shuffle(shuffled)
    expected = judged(pool, run, [whole])
    for parts in (
        [whole[::-1]],
        [tuple(shuffled)],
        [(step,) for step in shuffled],
        [whole[:2], whole[2:]],
        [(5, 3), (0, 1, 2, 4)],
    ):
        assert judged(pool, run, parts) == expected, parts
    assert judged(pool, run, [whole], OUT_OF_ORDER) == expected
    assert any(result.compared.elements for result in expected)


@pytest.mark.parametrize(
    ("spec", "workloads", "batch", "accept"),
    [
        ("allreduce", ["loss_scaling", "accumulation", "frozen_later", "eval_mode"], 24, None),
        pytest.param(
            "tests.world.lossy:PowerSGD", ["tests.world.lossy:Small"], 64, "low-rank:2",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "tests.world.lossy:PostLocalSGD", ["tests.world.lossy:Small"], 64, "local-sgd:2",
            marks=pytest.mark.sweep,
        ),
        pytest.param("ddp", [name for name in CELLS if not name.startswith("over")], 24, None,
                     marks=pytest.mark.sweep),
    ],
    ids=["cells", "low-rank", "local-sgd", "all cells"],
)  # fmt: skip
def test_steps_and_checks_out_of_order(
    pool: Pool, tmp_path: Path, spec: str, workloads: list[str], batch: int, accept: str | None
) -> None:
    for run in saved(pool, tmp_path / "run", spec, workloads, batch=batch, accept=accept):
        whole = tuple(range(run.case.steps))
        expected = judged(pool, run, [whole])
        assert any(result.compared.elements for result in expected), run.case.id
        assert judged(pool, run, [whole], OUT_OF_ORDER) == expected, run.case.id
