"""The gate as a service runs it: the jobs of examples/ci/ and the commands of docs/gate.md."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.world.command import COMMAND, ROOT

CI = ROOT / "examples" / "ci"
GUIDE = (ROOT / "docs" / "gate.md").read_text()
INSTALLS = (
    "install --extra-index-url https://download.pytorch.org/whl/cpu "
    "git+https://HOST/OWNER/distcheck@COMMIT"
)
BROKEN = """import torch.distributed as dist


def sync(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
"""
MENDED = BROKEN + "        parameter.grad /= dist.get_world_size()\n"
(MATRIX,) = re.findall(r"```toml\n(.+?)```", GUIDE, re.DOTALL)
SMALL = """
[tool.distcheck]
strategies = ["allreduce", "my_sync.py:sync"]
worlds = [2]
workloads = ["mlp:small"]
dtypes = ["float32"]
separate = false
"""


@dataclass
class Service:
    """Runs jobs, each in a checkout of its own, and carries artifacts from one to the next."""

    folder: Path
    sync: str
    matrix: str
    jobs: list[Path] = field(default_factory=list)

    def checkout(self) -> Path:
        """A fresh copy of the repository."""
        job = self.folder / f"job-{len(self.jobs)}"
        job.mkdir()
        (job / "my_sync.py").write_text(self.sync)
        (job / "pyproject.toml").write_text(self.matrix)
        self.jobs.append(job)
        return job

    def run(self, lines: str, job: Path, **more: str) -> "subprocess.CompletedProcess[str]":
        """Lines of a job, in bash as the services start it; what pip would install is here."""
        own = self.folder / "bin"
        if not own.exists():
            own.mkdir()
            (own / "pip").write_text(f"#!/bin/sh\ntest \"$*\" = '{INSTALLS}'\n")
            (own / "distcheck").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
            for script in own.iterdir():
                script.chmod(0o755)
        path = f"{own}:/usr/bin:/bin"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("CI_", "GITHUB_"))}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", lines],
            cwd=job, env={**environment, "PATH": path, "COLUMNS": "100", **more},
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip


def filled(text: str, values: dict[str, Any]) -> str:
    """`${{ matrix.part }}` and its like; anything else of that kind would be a surprise."""
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: str(values[found.group(1)]), text)


def github_cells(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        yield dict(zip(matrix, values, strict=True))


def run_on_github(
    service: Service, name: str, artifacts: Path
) -> list["subprocess.CompletedProcess[str]"]:
    """A job of the workflow in all its cells: what its last command said."""
    workflow = yaml.safe_load((CI / "github.yml").read_text())
    ends = []
    for values in github_cells(workflow["jobs"][name]):
        job = service.checkout()
        more = {"GITHUB_WORKSPACE": str(job), "GITHUB_STEP_SUMMARY": str(job / "summary.md")}
        said = {**workflow["env"], **workflow["jobs"][name].get("env", {})}
        more |= {key: filled(str(value), values) for key, value in said.items()}
        red = False
        for step in workflow["jobs"][name]["steps"]:
            if red and step.get("if") != "always()":
                continue
            if "run" in step:
                ran = service.run(filled(step["run"], values), job, **more)
                red = ran.returncode != 0
            elif step["uses"].startswith("actions/upload-artifact@"):
                folder = artifacts / filled(step["with"]["name"], values)
                folder.mkdir(parents=True)
                for pattern in filled(step["with"]["path"], values).split():
                    for found in job.glob(pattern):
                        shutil.copy(found, folder)
            elif step["uses"].startswith("actions/download-artifact@"):
                assert step["with"]["merge-multiple"]
                for found in artifacts.glob(f"{step['with']['pattern']}/*"):
                    shutil.copy(found, job)
            else:
                assert step["uses"].startswith(("actions/checkout@", "actions/setup-python@"))
        ends.append(ran)
    return ends


def run_on_gitlab(
    service: Service, name: str, brought: list[Path]
) -> list["subprocess.CompletedProcess[str]"]:
    """A job of the pipeline, as often as it is to run in parallel; what it brings takes the place
    of what was brought.
    """
    pipeline = yaml.safe_load((CI / "gitlab-ci.yml").read_text())
    base, job = pipeline[".distcheck"], pipeline[name]
    assert job["extends"] == ".distcheck"
    assert job["stage"] in pipeline["stages"]
    assert job["artifacts"]["when"] == base["rules"][0]["when"] == "always"
    total = job.get("parallel", 1)
    earlier, ends = [*brought], []
    brought.clear()
    for index in range(1, total + 1):
        folder = service.checkout()
        for artifact in earlier:
            shutil.copy(artifact, folder)
        more = {**base["variables"], "CI_NODE_INDEX": str(index), "CI_NODE_TOTAL": str(total)}
        lines = "\n".join([*base["before_script"], *job["script"]])
        ends.append(service.run(lines, folder, **more))
        reports = job["artifacts"].get("reports", {}).values()
        for pattern in (*job["artifacts"]["paths"], *reports):
            brought += folder.glob(pattern)
    return ends


@pytest.mark.sweep
def test_a_bug_turns_both_services_red_and_is_replayed_elsewhere(tmp_path: Path) -> None:
    service, artifacts = Service(tmp_path, BROKEN, SMALL), tmp_path / "artifacts"
    parts = run_on_github(service, "verify", artifacts)
    assert sorted(ran.returncode for ran in parts) == [0, 1], [ran.stderr for ran in parts]
    brought = [next(artifacts.glob(f"distcheck-{n}/*")) for n in (1, 2)]
    (report,) = run_on_github(service, "report", artifacts)
    assert report.returncode == 1, report.stderr
    (annotation,) = re.findall(r"^::error (file=.+?)::(.+)$", report.stdout, re.MULTILINE)
    assert annotation[0].startswith("file=my_sync.py,line=6,title=distcheck%3A fail (missing-div")
    message = annotation[1].split("%0A")
    assert message[0].startswith("cause: missing-division: ")
    assert any(line.startswith("first: gradients (rounding): step 0, ") for line in message)
    whole = artifacts / "distcheck-whole"
    root = ElementTree.parse(whole / "distcheck.xml").getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("2", "1", "0")
    assert json.loads((whole / "distcheck.json").read_text())["verdict"] == "fail"
    assert "divide by the number of ranks" in (whole / "distcheck.html").read_text()
    summary = (service.jobs[-1] / "summary.md").read_text()
    assert summary.startswith("## distcheck: ❌ fail\n\n1 passed, 1 failed\n")
    replay = message[-1].removeprefix("replay: ")
    again = service.run(replay, service.checkout())
    assert again.returncode == 1, again.stderr
    assert "missing-division" in again.stdout
    gitlab_says_the_same(service, brought)
    # A part whose machine was lost brings nothing, and whatever the others say is not enough.
    (lost,) = [
        a
        for a in artifacts.glob("distcheck-?")
        if json.loads(next(a.iterdir()).read_text())["verdict"] == "fail"
    ]
    shutil.rmtree(lost)
    shutil.rmtree(whole)
    (report,) = run_on_github(service, "report", artifacts)
    assert report.returncode == 5
    assert "but in no report" in report.stdout


def gitlab_says_the_same(service: Service, brought: list[Path]) -> None:
    """Its jobs ask for the parts that GitHub's did: those are not run a second time."""
    command = service.folder / "bin" / "distcheck"
    real = command.read_text()
    kept = " ".join(map(str, brought))
    command.write_text(
        f'#!/bin/sh\nset -- {kept} "$@"\ntest "$3 $4 $6 $7" = "verify --shard --json '
        'distcheck-${5%/2}.json" || exit 9\ncase $5 in 1/2) cp $1 $7;; 2/2) cp $2 $7; exit 1;; '
        "*) exit 9;; esac\n"
    )
    found: list[Path] = []
    ends = run_on_gitlab(service, "gradient sync", found)
    assert [ran.returncode for ran in ends] == [0, 1], [ran.stderr for ran in ends]
    command.write_text(real)
    assert [path.name for path in found] == ["distcheck-1.json", "distcheck-2.json"]
    (report,) = run_on_gitlab(service, "gradient sync report", found)
    assert report.returncode == 1, report.stderr
    names = ["distcheck.json", "distcheck.html", "distcheck.xml"]
    assert [path.name for path in found] == names
    root = ElementTree.parse(found[2]).getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("2", "1", "0")


@pytest.mark.sweep
def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    """All of them, one after the other, in one checkout, with a sync that is wrong."""
    service = Service(tmp_path, BROKEN, MATRIX)
    job = service.checkout()
    commands = [line for block in re.findall(r"```sh\n(.+?)```", GUIDE, re.DOTALL)
                for line in block.splitlines()]  # fmt: skip
    ends = [(command, service.run(command, job)) for command in commands]
    codes = {" ".join(shlex.split(command)[:4]): ran.returncode for command, ran in ends}
    assert codes == {
        "distcheck plan": 0, "distcheck verify --json distcheck.json": 1,
        "distcheck verify --shard 1/2": 0, "distcheck verify --shard 2/2": 1,
        "distcheck merge part-1.json part-2.json": 1,
    }, [ran.stderr for _, ran in ends]  # fmt: skip
    assert ends[0][1].stdout.startswith("plan    3 cases from pyproject.toml; digest ")
    documents = [json.loads((job / f"{name}.json").read_text()) for name in ("distcheck", "whole")]
    alike = [
        [(case["case"]["id"], case["verdict"], case["strategy_line"]) for case in document["cases"]]
        for document in documents
    ]
    assert alike[0] == alike[1]
    assert "::error file=my_sync.py,line=6," in ends[-1][1].stdout
    # What earlier runs took is known now.
    again = service.run("distcheck plan --json plan.json", job)
    assert "~" not in "".join(re.findall(r"^  ddp.*$", again.stdout, re.MULTILINE))
    plan = json.loads((job / "plan.json").read_text())
    assert plan["schema"] == "distcheck.plan/1"
    basis = {case["strategy"]: case["basis"] for case in plan["cases"]}
    assert basis == {"ddp": "recorded", "my_sync.py:sync": "rough"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("verify --shard 3/2", 2, "--shard '3/2' is not a part; expected I/N"),
        ("verify --config none.toml", 2, "--config none.toml cannot be read"),
        ("verify --junit /proc/x.xml", 3, "--junit /proc/x.xml cannot be written"),
        ("verify --strategy dpp", 2, "unknown strategy 'dpp' (did you mean ddp?)"),
        ("merge pyproject.toml", 2, "pyproject.toml is not a report that --json wrote"),
        ("merge", 2, "Missing argument 'PART.json...'"),
    ],
)
def test_bad_input_of_a_gate(tmp_path: Path, words: str, code: int, message: str) -> None:
    service = Service(tmp_path, MENDED, SMALL)
    job = service.checkout()
    ran = service.run(f"distcheck {words}", job)
    assert ran.returncode == code
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stdout == ""
    assert {path.name for path in job.iterdir()} <= {"my_sync.py", "pyproject.toml", ".distcheck"}
