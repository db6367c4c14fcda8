"""A plan and the command line that made it: what was typed is in the plan."""

from pathlib import Path

import msgspec
import pytest

from distcheck.cli.commands.verify import command as verify
from distcheck.cli.options import given_options
from distcheck.cli.verify_options import plan_from_options
from distcheck.records import RunPlan
from distcheck.reports.documents import not_in_plan
from distcheck.reports.files import pop_output_files

TWO = "--strategy allreduce --strategy ring --world 2 --world 3"


def plan_of(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    """What the command plans, as it does itself."""
    monkeypatch.chdir(folder)
    with verify.make_context("verify", words.split()) as context:
        asked, given = dict(context.params), given_options()
        pop_output_files(asked)
        for name in ("save", "digests", "verbose", "quiet"):
            asked.pop(name)
        _, plan = plan_from_options(asked, given)
        return plan().whole


@pytest.mark.parametrize(
    "words",
    ["--strategy allreduce", TWO, f"{TWO} --workload mlp --workload exact --dtype float32",
     f"{TWO} --workload=mlp --seed 07 --backend gloo --device cpu --dtype float64",
     "--strategy ./mine.py:sync --strategy mine.py:sync --world=02 --accept low-precision:bf16",
     "--strategy allreduce --thorough --world 3 --workload exact --explore-s 0",
     f"{TWO} --shard 2/4", "--world 2 --arg a=--world"],
)  # fmt: skip
def test_plans_requested_cases(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def sync(model): ...\n")
    matrix = '[tool.distcheck]\nstrategies = ["ddp"]\nworlds = [4]\ndtypes = ["float64"]\n'
    (tmp_path / "pyproject.toml").write_text(matrix)
    plan = plan_of(words, tmp_path, monkeypatch)
    assert plan.cases
    assert not list(not_in_plan(f"distcheck verify {words}", plan))


@pytest.mark.parametrize("dropped", [{"strategy": "ring"}, {"strategy": "ring", "world": 3}])
def test_a_dropped_case_is_missed(
    dropped: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(f"{TWO} --workload mlp", tmp_path, monkeypatch)
    left = [
        cell
        for cell in plan.cases
        if any(getattr(cell, name) != value for name, value in dropped.items())
    ]
    forged = msgspec.structs.replace(plan, cases=tuple(left))
    (*_, said) = not_in_plan(f"distcheck verify {TWO} --workload mlp", forged)
    assert "asks for strategy ring, world 3, workload mlp, but the plan has no such case" in said


@pytest.mark.parametrize(
    "command",
    [
        "", "pytest --strategy x", "distcheck merge a.json", "distcheck verify --strategy 'x",
        "distcheck verify --world", "distcheck verify --strategy 'a<$TOKEN>'",
    ],
)  # fmt: skip
def test_unreadable_requests(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("--strategy allreduce", tmp_path, monkeypatch)
    assert not list(not_in_plan(command, plan))
