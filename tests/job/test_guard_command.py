"""`distcheck job --guard`: the command's end is its own, and what ranks found is the report."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distcheck.errors import DistcheckError, UsageError
from distcheck.job import guard_command, running
from distcheck.job.guard import records
from distcheck.job.guard.records import Divergence, GuardProgress, ReplicaFinding
from distcheck.job.guard_command import GuardOptions, guard_job
from distcheck.job.running import CommandResult
from distcheck.job.settings import JobSettings, read
from tests.world import warm

LOSES_A_REPLICA = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 13):
    torch.manual_seed(step * 10 + dist.get_rank())
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    if step == 10 and dist.get_rank() == 1:
        with torch.no_grad():
            model.module.bias[0] += 1e-6
print("ended", flush=True)
sys.exit(7 * dist.get_rank())
"""


def test_a_replica_that_is_lost_late_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    """After the steps that a recording has by default, and too small for a loss curve."""
    script = tmp_path / "train.py"
    script.write_text(LOSES_A_REPLICA)
    words = ["job", "--guard", "--every", "4", "--warn", "--nproc", "2", "--json", "report.json"]
    words += ["--", sys.executable]
    ran = warm.run(*words, str(script), cwd=tmp_path, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert ran.stdout.count("ended") == 2
    assert "first  step 12: bias differs between rank 0 and rank 1" in ran.stdout
    assert "parameters-modified-outside-step" in ran.stdout
    (bundle,) = (tmp_path / ".distcheck" / "guard").iterdir()
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    rows = [(row["operation"], row["place"].partition(":")[0]) for row in case["ledger"]["rows"]]
    assert (case["ledger"]["step"], rows[0]) == (1, ("all_reduce", "train.py"))
    said = warm.run("explain", str(bundle), cwd=tmp_path, timeout=60)
    assert said.returncode == 1
    assert "they agreed at step 8" in said.stdout
    assert "cause   parameters-modified-outside-step" in said.stdout


def checked(rank: int, **about: Any) -> GuardProgress:
    given = {"rank": rank, "world": 2, "optimizer": "SGD", "steps": 9, "checks": 3,
             "checked_at": 9, "compared": 4}  # fmt: skip
    return GuardProgress(**{**given, **about})


def judged(
    monkeypatch: pytest.MonkeyPatch, found: list[GuardProgress], code: int = 0, defect: str = ""
) -> tuple[str, int]:
    """The verdict of the check, and the exit code, where ranks left these files."""

    def run(command: Any, settings: Path, **_: Any) -> CommandResult:
        for one in found:
            file = settings.parent / f"guard-{one.rank:04d}-{one.rank}-0.json"
            file.write_bytes(msgspec.json.encode(one))
        if defect:
            (settings.parent / "defect").write_text(defect)
        (settings.parent / "python-1").touch()
        (settings.parent / "torch-1").touch()
        return CommandResult(code, ())

    monkeypatch.setattr(running, "run", run)
    report, exit_code = guard_job(GuardOptions(words=(sys.executable, "train.py")))
    return report.cases[0].checks[1].verdict, exit_code


@pytest.mark.parametrize(
    ("changes", "code", "expected"),
    [
        ({}, 0, ("pass", 0)),
        ({}, 7, ("pass", 7)),  # the command's own
        ({"first": "step 4: w differs"}, 0, ("fail", 1)),
        ({"first": "step 4: w differs"}, 7, ("fail", 1)),
        ({"checks": 0}, 0, ("unknown", 5)),
        ({"compared": 0}, 0, ("unknown", 5)),
        ({"checked_at": 8}, 0, ("unknown", 5)),
        ({"world": 1}, 0, ("unknown", 5)),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: int, expected: tuple[str, int]
) -> None:
    found = [checked(rank, **changes) for rank in range(2)]
    assert judged(monkeypatch, found, code) == expected


@pytest.mark.parametrize("accept", [(), ("shared-rng-seed",)], ids=str)
def test_one_seed_can_be_meant(monkeypatch: pytest.MonkeyPatch, accept: tuple[str, ...]) -> None:
    """Ranks are not asked to draw different numbers, and the report does not say that they did."""
    asked: list[JobSettings] = []

    def run(command: Any, settings: Path, **_: Any) -> CommandResult:
        asked.append(read(settings))
        for rank in range(2):
            file = settings.parent / f"guard-{rank:04d}-{rank}-0.json"
            file.write_bytes(msgspec.json.encode(checked(rank)))
        return CommandResult(0, ())

    monkeypatch.setattr(running, "run", run)
    report, _ = guard_job(GuardOptions(words=(sys.executable, "train.py"), accept=accept))
    assert [one.randomness for one in asked] == [not accept]
    assert ("independence of RNG streams" in report.not_shown) == bool(accept)


def test_nothing_seen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DistcheckError, match="no optimizer step"):
        judged(monkeypatch, [])


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="--every must be at least 1"):
        GuardOptions(words=("python",), every=0)


@pytest.mark.parametrize("words", [["--every", "5"], ["--warn"]])
def test_options_of_a_guard_without_one(words: list[str], tmp_path: Path) -> None:
    ran = warm.run("job", *words, "--", "true", cwd=tmp_path)
    assert ran.returncode == 2
    assert "pass --guard as well" in ran.stderr


def test_a_bundle_that_cannot_be_read_leaves_the_finding(tmp_path: Path) -> None:
    one = checked(0, first="step 4: w differs", file=str(tmp_path / "gone.json"))
    assert guard_command._causes(one) == []
    found = ReplicaFinding(
        kind="samples", first="samples", groups=((0, 1),), differing=8, compared=8
    )
    file = records.write(
        Divergence(step=4, agreed_at=-1, every=4, ranks=(0, 1), findings=(found,)), tmp_path
    )
    causes = guard_command._causes(checked(0, first="x", file=str(file)))
    assert [cause.cause for cause in causes] == ["same-data"]
    said = warm.run("explain", str(file), cwd=tmp_path).stdout
    assert "cause   same-data" in said
    assert "differ" not in said, "common samples are no names of tensors that differ"
