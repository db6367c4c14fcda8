"""What a judge says of a step depends on that step alone: not on which steps it judges besides, nor
on their order.
"""

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distcheck
from distcheck.judge.checks.merging import merge_results
from distcheck.judge.jobs import JUDGE, JudgeRequest
from distcheck.records import CheckResult
from distcheck.store import run_folder
from distcheck.verification.book import run_of
from distcheck.verification.case_runs import RecordedRun
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool
from tests.world.test_kinks import AtAKink

STEPS = 6


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


def judged(pool: Pool, run: RecordedRun, parts: list[tuple[int, ...]]) -> list[CheckResult]:
    """Each part by a judge of its own; the results merged in the order of the steps."""
    planned = tuple((p.check, p.layer) for p in run.plan.planned if p.scope == "step")
    found: list[tuple[int, list[CheckResult]]] = []
    for steps in parts:
        request = JudgeRequest(
            case=run.case, contract=run.plan.contract, layout=run.plan.layout, description=b"",
            steps=steps, planned=planned,
        )  # fmt: skip
        answer = run_job(pool, JUDGE, request, {"trace": run.trace_fd})
        found.append((min(steps), answer))
    columns = zip(*[results for _, results in sorted(found)], strict=True)
    return [merge_results(column) for column in columns]


@pytest.mark.parametrize(
    ("spec", "workload", "batch"),
    [
        (f"{__name__}:a_little_off", "mlp", 24),
        (f"{__name__}:rounds_on_the_way", "lattice", 24),
        ("allreduce", "tests.world.test_kinks:AtAKink", 6),
        ("allreduce", f"{__name__}:SeesOthersAtFirst", 6),
    ],
)
def test_order_and_split_change_nothing(
    pool: Pool, tmp_path: Path, spec: str, workload: str, batch: int
) -> None:
    save = tmp_path / "run"
    distcheck.verify(
        spec, world=2, workload=workload, dtype="float32", batch=batch, steps=STEPS, separate=False,
        save=save,
    )  # fmt: skip
    (folder,) = run_folder.saved_cases(save)
    saved, fds = run_folder.read_trace(pool, folder)
    run = run_of(saved, fds)
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
    for fd in fds:
        os.close(fd)
    assert any(result.compared.elements for result in expected)
