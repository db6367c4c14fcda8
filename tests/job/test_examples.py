"""Whole jobs as people write them: right ones pass, and of planted bugs each is named.

In every run, tests/job/test_bad_jobs.py has a whole job that is wrong, and test_checks.py what the
checks of a job say of each mistake.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distcheck import backends
from distcheck.compare.jobs import compare_jobs
from distcheck.records.causes import causes
from tests.job.planted import BUGS, FOLDER, PRESUMES, SCRIPTS, Bug, plant, unfounded
from tests.launchers.processes import free_port
from tests.world import warm

FRAMEWORKS = {
    "with_accelerate": "accelerate", "resuming_accelerate": "accelerate",
    "with_fabric": "lightning_fabric", "with_trainer": "transformers",
}  # fmt: skip


def judge(script: Path, folder: Path, *options: str, world: int = 2) -> tuple[int, dict[str, Any]]:
    """The exit code of `distcheck job`, and its report."""
    for name, package in FRAMEWORKS.items():
        if name == script.stem and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (the extra `frameworks` has it)")
    command = ["--nproc", str(world), *options, "--", sys.executable]
    return judge_command([*command, str(script)], folder)


def judge_command(command: list[str], folder: Path) -> tuple[int, dict[str, Any]]:
    """The same of any options and command."""
    file = folder / "report.json"
    ran = cli("job", folder, "--steps", "6", "--json", str(file), *command)
    assert file.exists(), ran.stdout + ran.stderr
    return ran.returncode, json.loads(file.read_text())["cases"][0]


def cli(command: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return warm.run(command, *words, cwd=folder, timeout=300)


def marked(name: str, *, always: bool) -> Any:
    return name if always else pytest.param(name, marks=pytest.mark.sweep)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", [marked(s, always=s == "by_hand.py") for s in SCRIPTS])
def test_a_right_job_passes(name: str, world: int, tmp_path: Path) -> None:
    keeps = world > 2  # runs the command twice more, as test_two_jobs.py has it in every run
    code, case = judge(FOLDER / name, tmp_path, *["--save", "kept"] * keeps, world=world)
    said = [*case["diagnosis"], *case.get("remarks", [])]
    assert (code, case["verdict"], said) == (0, "pass", [])
    listed = cli("runs", tmp_path).stdout
    assert "pass" in listed
    assert f"distcheck job --steps 6 --json {tmp_path}/report.json" in listed
    (run,) = (tmp_path / ".distcheck" / "runs").iterdir()
    refused = cli("replay", tmp_path, str(run))
    assert refused.returncode == 2
    assert f"runs a command: {case['replay']}; review it, then pass --trust" in refused.stderr
    if keeps:
        compared, _ = compare_jobs(tmp_path / "kept", tmp_path / "kept", bits=True)
        assert (compared.verdict, compared.bits, len(compared.found.drift)) == ("pass", "same", 6)
    assert case["case"]["world"] == world
    assert case["ledger"]["step"] == 5
    reduced = [row for row in case["ledger"]["rows"] if "reduce" in row["operation"]]
    assert {row["ranks"] for row in reduced} == {world}
    assert sum(row["bytes"] for row in reduced) >= case["ledger"]["gradient_bytes"] > 0
    of_gradients = [c for c in case["checks"] if c["check"] == "gradients"]
    layers = ["rounding", "full batch float32"]
    assert [c["layer"] for c in of_gradients] == layers
    assert {c["compared"]["ranks"] for c in of_gradients} == {world}
    # Trainer divides by a number that it counts from a batch ahead: the replay covers one step.
    covered = 1 if name == "with_trainer.py" else 6
    assert [c["compared"]["steps"] for c in of_gradients] == [6, covered][-len(layers) :]


@pytest.mark.sweep
@pytest.mark.parametrize("name", [bug.name for bug in BUGS])
def test_a_planted_bug_is_named(name: str, tmp_path: Path) -> None:
    bug: Bug = next(bug for bug in BUGS if bug.name == name)
    code, case = judge(plant(bug, tmp_path), tmp_path, *bug.options)
    assert (code, case["verdict"]) == (1, "fail")
    assert bug.cause in {found["cause"] for found in case["diagnosis"]}
    assert unfounded(case, (tmp_path / bug.script).read_text()) == []
    if bug.where:
        assert case["where"]["file"] == bug.script
        assert case["where"]["code"] == bug.where


@pytest.mark.sweep
@pytest.mark.parametrize("name", [bug.name for bug in BUGS if bug.script == "nanogpt_like.py"])
def test_a_bug_in_accumulation_is_named_at_world_3(name: str, tmp_path: Path) -> None:
    """As one process, nanoGPT's script makes three times as many passes."""
    bug: Bug = next(bug for bug in BUGS if bug.name == name)
    code, case = judge(plant(bug, tmp_path), tmp_path, world=3)
    assert (code, [found["cause"] for found in case["diagnosis"]]) == (1, [bug.cause])


LAUNCH = (
    "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--main_process_port", "0",
)  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["", "the loss divided although accelerate divides"])
def test_accelerate_launch_is_a_command_like_others(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra `frameworks`)")
    script = FOLDER / "with_accelerate.py"
    if name:
        script = plant(next(bug for bug in BUGS if bug.name == name), tmp_path)
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, str(script)]
    code, case = judge_command(["--", *command], tmp_path)
    expected = (1, "fail", ["accumulation-scaled-twice"]) if name else (0, "pass", [])
    assert (code, case["verdict"], [d["cause"] for d in case["diagnosis"]]) == expected
    assert case["case"]["world"] == 2


@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("--strict",)], ids=["usual", "strict"])
def test_accelerate_steps_per_rank_as_a_remark(options: tuple[str, ...], tmp_path: Path) -> None:
    text = (FOLDER / "with_accelerate.py").read_text()
    asked = "step_scheduler_with_optimizer=False"
    assert text.count(asked) == 1
    script = tmp_path / "with_accelerate.py"
    script.write_text(text.replace(asked, "step_scheduler_with_optimizer=True"))
    code, case = judge(script, tmp_path, "--steps", "12", *options)
    where = "diagnosis" if options else "remarks"
    assert (code, case["verdict"]) == ((1, "fail") if options else (0, "pass"))
    assert [one["cause"] for one in case[where]] == ["scheduler-steps-per-rank"]


# What a script under mpirun does before it makes its process group.
UNDER_MPIRUN = """    import os
    for name in ("RANK", "SIZE"):
        os.environ.setdefault("WORLD_SIZE" if name == "SIZE" else name, os.environ.get(
            f"OMPI_COMM_WORLD_{name}", os.environ.get(f"PMI_{name}", "1" if name == "SIZE" else "0")
        ))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "%d")
"""


@pytest.mark.sweep
@pytest.mark.skipif(bool(backends.missing("mpi")), reason=backends.missing("mpi") or "MPI is there")
@pytest.mark.parametrize("name", ["", "every rank reads all samples"])
def test_mpirun_is_a_command_like_others(name: str, tmp_path: Path) -> None:
    script = FOLDER / "plain_ddp.py"
    if name:
        script = plant(next(bug for bug in BUGS if bug.name == name), tmp_path)
    group = "    dist.init_process_group"
    text = script.read_text()
    assert text.count(group) == 1
    script = tmp_path / "under_mpirun.py"
    script.write_text(text.replace(group, UNDER_MPIRUN % free_port() + group))
    from distcheck.addons.mpi.library import find_launcher

    launcher = find_launcher()
    assert launcher is not None
    root = [] if launcher.kind == "MPICH" else ["--oversubscribe", "--allow-run-as-root"]
    command = ["--", launcher.path, *root, "-n", "2", sys.executable, str(script)]
    code, case = judge_command(command, tmp_path)
    expected = (1, "fail", ["same-data"]) if name else (0, "pass", [])
    assert (code, case["verdict"], [d["cause"] for d in case["diagnosis"]]) == expected
    assert case["case"]["world"] == 2


TWO_NODES = """
start() {{
    {python} -m torch.distributed.run --nnodes 2 --node-rank $1 --nproc-per-node 1 \\
        --master-addr 127.0.0.1 --master-port {port} {script}
}}
start 1 &
start 0
code=$?
wait
exit $code
"""


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["", "no set_epoch"])
def test_two_nodes_on_one_machine_are_one_job(name: str, tmp_path: Path) -> None:
    script = FOLDER / "plain_ddp.py"
    if name:
        script = plant(next(bug for bug in BUGS if bug.name == name), tmp_path)
    both = TWO_NODES.format(python=sys.executable, port=free_port(), script=script)
    (tmp_path / "both.sh").write_text(both)
    code, case = judge_command(["--", "sh", "both.sh"], tmp_path)
    expected = (1, "fail", ["missing-set-epoch"]) if name else (0, "pass", [])
    assert (code, case["verdict"], [d["cause"] for d in case["diagnosis"]]) == expected
    assert case["case"]["world"] == 2
    of_gradients = [c for c in case["checks"] if c["check"] == "gradients"]
    assert [c["layer"] for c in of_gradients] == ["rounding", "full batch float32"]


def test_advice_about_what_a_script_lacks_is_found() -> None:
    """Each of these is the advice of some cause, so that no rule here is about nothing."""
    advice = [one for cause in causes().values() for one in cause.suggestions.values()]
    for presumed in PRESUMES:
        of_it = [one for one in advice if re.search(presumed, one)]
        assert of_it, presumed
        case = {"diagnosis": [{"cause": "", "suggestion": of_it[0]}]}
        assert len(unfounded(case, "import torch")) == 1


def test_every_edit_fits_its_script(tmp_path: Path) -> None:
    for bug in BUGS:
        plant(bug, tmp_path)
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.sweep
def test_an_exchange_in_every_pass_is_only_slow(tmp_path: Path) -> None:
    """As most scripts accumulate; gradients of passes may cancel, and each exchange rounds them."""
    right = (FOLDER / "nanogpt_like.py").read_text()
    line = next(line for line in right.splitlines() if "require_backward_grad_sync" in line)
    (tmp_path / "train.py").write_text(right.replace(line + "\n", ""))
    code, report = judge(tmp_path / "train.py", tmp_path)
    assert code == 0, report
    assert "correct, but slower than no_sync()" in json.dumps(report)


AVERAGES = """            if len(seen) % {every} == 0:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= {by}
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("every", "by", "verdict", "causes"),
    [
        (1, "world", "unknown", []),
        (7, "world", "unknown", []),  # after the steps that are recorded otherwise
        (7, "1", "fail", ["wrong-divisor"]),
        (99, "world", "fail", ["missing-sync"]),
    ],
)
def test_local_sgd(every: int, by: str, verdict: str, causes: list[str], tmp_path: Path) -> None:
    """Ranks step by their own gradients, and average their parameters every few steps."""
    text = (FOLDER / "plain_ddp.py").read_text()
    for old, new in (
        ("    model = DistributedDataParallel(model)\n", "    seen = []\n"),
        ("            scheduler.step()\n",
         "            seen.append(1)\n" + AVERAGES.format(every=every, by=by)),
        ("range(3)", "range(9)"),
    ):  # fmt: skip
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = tmp_path / "local_sgd.py"
    script.write_text(text)
    code, case = judge(script, tmp_path)
    assert (case["verdict"], [one["cause"] for one in case["diagnosis"]]) == (verdict, causes)
    assert code == {"unknown": 5, "fail": 1}[verdict]
    assert case["case"]["steps"] == (6 if every == 99 else 24)
