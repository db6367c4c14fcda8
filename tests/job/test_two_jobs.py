"""Whole commands: a job that is kept, one that continues it, and two that are compared."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from distcheck.judge.divergence import noise_floor
from tests.job.planted import FOLDER
from tests.job.test_examples import cli

RESUMING = FOLDER / "resuming.py"
# What one process computes as well: no BatchNorm, and no random numbers.
PLAIN = ("--norm", "0", "--dropout", "0")
SMALL = """
import sys, os, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
if len(sys.argv) > 1:
    first, own, held = torch.load(sys.argv[1])
    model.load_state_dict(own)
    optimizer.load_state_dict(held)
for step in range(first, 4):
    drawn = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(4, 3, generator=drawn)).square().mean().backward()
    optimizer.step()
    if step == 1:
        torch.save((2, model.state_dict(), optimizer.state_dict()), "saved.pt")
"""


def job(folder: Path, *words: str, **about: Any) -> tuple[int, dict[str, Any]]:
    """The exit code, and the case of the report."""
    file = folder / "report.json"
    file.unlink(missing_ok=True)
    ran = cli("job", folder, "--json", str(file), *words, **about)
    assert file.exists(), ran.stdout + ran.stderr
    return ran.returncode, json.loads(file.read_text())["cases"][0]


@pytest.mark.parametrize(
    "names", [("whole",), pytest.param(("whole", "again"), marks=pytest.mark.sweep)], ids=len
)
def test_a_job_its_continuation_and_a_rerun(tmp_path: Path, names: tuple[str, ...]) -> None:
    """One rank, and so without torchrun; the runs after the job leave its checkpoint alone."""
    (tmp_path / "small.py").write_text(SMALL)
    command = ("--", sys.executable, "small.py")
    for name in names:
        _, case = job(tmp_path, "--steps", "4", "--no-reference", "--save", name, *command)
        assert case["verdict"] == "unknown"  # one rank exchanges nothing
    measured = noise_floor.read_noise_floor(tmp_path / "whole")
    assert (len(measured.steps), measured.why) == (4, "")
    assert measured.steps[0]["step/weight"].distance > 0
    code, case = job(tmp_path, "--resumed-from", "whole", *command, "saved.pt")
    assert (code, case["verdict"], case["diagnosis"]) == (0, "pass", [])
    assert case["notes"][0].startswith("the job resumes before step 2 of the job in whole")
    if len(names) > 1:
        compared = cli("compare", tmp_path, *names)
        assert compared.returncode == 0, compared.stdout
        assert compared.stdout.startswith("no bit changed in 4 steps")


@pytest.mark.parametrize(
    "harm",
    [
        "recording.json",
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in ("rank-0000/step-000001.json", "noise_floor.json")
        ),
    ],
)
def test_nothing_runs_beside_a_damaged_recording(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "whole"
    (folder / "rank-0000").mkdir(parents=True)
    for name in ("recording.json", "rank-0000/rank.json", harm):
        (folder / name).write_text("[]")
    ran = cli("job", tmp_path, "--resumed-from", "whole", "--", "touch", "was-run")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "whole" in ran.stderr
    assert not (tmp_path / "was-run").exists()


def kept(folder: Path, name: str, script: Path, *words: str, world: int = 2) -> None:
    code, case = job(folder, "--save", name, "--steps", "6", "--nproc", str(world), "--",
                     sys.executable, str(script), *words)  # fmt: skip
    assert case["verdict"] == ("unknown" if world == 1 else "pass"), case
    del code


def edited(folder: Path, name: str, find: str, put: str, script: Path = RESUMING) -> Path:
    text = script.read_text()
    assert text.count(find) == 1
    made = folder / name
    made.write_text(text.replace(find, put))
    return made


CALL = "            loss = F.cross_entropy(model(inputs), labels)\n"
SHARD = """    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
"""
PAIRS = {  # what is edited in the second job, and how it may differ
    "again": ("import copy\n", "import copy\n", "same"),
    "compiled": ("= DistributedDataParallel(net)", "= torch.compile(DistributedDataParallel(net))",
                 "changed"),
    "bfloat16": (CALL, "            with torch.autocast('cpu', dtype=torch.bfloat16):\n    " + CALL,
                 "changed"),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", PAIRS)
def test_right_pairs_are_within_the_bound(name: str, tmp_path: Path) -> None:
    find, put, bits = PAIRS[name]
    kept(tmp_path, "then", RESUMING, *PLAIN)
    kept(tmp_path, "now", edited(tmp_path, "other.py", find, put), *PLAIN)
    compared(tmp_path, "pass", bits)


def compared(folder: Path, verdict: str, bits: str) -> dict[str, Any]:
    file = folder / "comparison.json"
    for pair in (("then", "now"), ("now", "then")):
        ran = cli("compare", folder, *pair, "--json", str(file), "--html", "page.html")
        document = json.loads(file.read_text())
        case: dict[str, Any] = document["cases"][0]
        assert (document["verdict"], case["bits"]) == (verdict, bits), ran.stdout
    return case


@pytest.mark.sweep
def test_one_rank_and_two_train_alike(tmp_path: Path) -> None:
    kept(tmp_path, "then", RESUMING, *PLAIN)
    kept(tmp_path, "now", RESUMING, *PLAIN, "--batch", "16", world=1)
    compared(tmp_path, "pass", "changed")


@pytest.mark.sweep
def test_fsdp2_and_ddp_train_alike(tmp_path: Path) -> None:
    fsdp = FOLDER / "fsdp2.py"
    put = "    model = torch.nn.parallel.DistributedDataParallel(model)\n"
    kept(tmp_path, "then", fsdp)
    kept(tmp_path, "now", edited(tmp_path, "ddp.py", SHARD, put, fsdp))
    compared(tmp_path, "pass", "same")


@pytest.mark.sweep
def test_fsdp2_in_bfloat16_is_near_float32(tmp_path: Path) -> None:
    """The yardstick is that of the dtype that it computes in."""
    fsdp = FOLDER / "fsdp2.py"
    policy = "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
    put = SHARD.replace("mesh=mesh", f"mesh=mesh, mp_policy={policy}")
    kept(tmp_path, "then", fsdp)
    kept(tmp_path, "now", edited(tmp_path, "short.py", SHARD, put, fsdp))
    compared(tmp_path, "pass", "changed")


CLIP = """            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
"""
BUGS = {
    "label smoothing": (CALL, CALL.replace("labels)", "labels, label_smoothing=1e-3)")),
    "a shorter schedule": ("(step + 1) / 6)", "(step + 1) / 5)"),
    "a loss times two": (CALL, CALL.replace("F.cross", "2 * F.cross")),
    "another clip": ("            scaler.step(optimizer)\n", CLIP),
    "another Adam": ("lr=1e-2)", "lr=1e-2, amsgrad=True)"),
}  # fmt: skip
NAMED = {
    "label smoothing": "unexplained", "a shorter schedule": "learning-rate-differs",
    "a loss times two": "wrong-divisor", "another clip": "clip-norm-differs",
    "another Adam": "optimizer-settings-differ",
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", BUGS)
def test_what_is_no_rounding_fails(name: str, tmp_path: Path) -> None:
    kept(tmp_path, "then", RESUMING, *PLAIN)
    kept(tmp_path, "now", edited(tmp_path, "other.py", *BUGS[name]), *PLAIN)
    case = compared(tmp_path, "fail", "changed")
    assert [one["cause"] for one in case["diagnosis"]] == [NAMED[name]]


@pytest.mark.sweep
@pytest.mark.parametrize("script", ["resuming.py", "resuming_accelerate.py"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_restart_in_another_world_passes(script: str, world: int, tmp_path: Path) -> None:
    """From two ranks to one with both batches, to two, and to three with other samples."""
    if script != RESUMING.name and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (the extra `frameworks` has it)")
    by_hand = script == RESUMING.name
    words = [str(FOLDER / script), *(PLAIN if by_hand else ())]
    job(tmp_path, "--save", "whole", "--nproc", "2", "--", sys.executable, *words, "--save-at", "3")
    more = ["--batch", "16"] if by_hand and world == 1 else []
    saved = "checkpoint.pt" if by_hand else "state"
    code, case = job(
        tmp_path, "--resumed-from", "whole", "--nproc", str(world), "--steps", "2", "--",
        sys.executable, *words, *more, "--resume", saved,
    )  # fmt: skip
    if world == 2 or more:
        assert (code, case["diagnosis"]) == (0, []), case
    else:  # three ranks, or one with half of the samples, train on others in a step
        assert code == 1
        assert {one["cause"] for one in case["diagnosis"]} <= {
            "resume-changes-data-order", "resume-repeats-samples", "resume-skips-samples",
        }, case["diagnosis"]  # fmt: skip
