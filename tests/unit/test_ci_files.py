"""What others copy or call: the action, examples for services, the hook, container files."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import distcheck
from distcheck.cli import root_command

ROOT = Path(__file__).parents[2]
CI = ROOT / "examples" / "ci"
ACTION = ROOT / "action.yml"
WORKFLOWS = [CI / "github.yml", CI / "github-action.yml"]
HOOKS = ROOT / ".pre-commit-hooks.yaml"
DEVCONTAINER = ROOT / ".devcontainer" / "devcontainer.json"
COPIED = [ACTION, *sorted(CI.iterdir()), HOOKS, ROOT / "Dockerfile", DEVCONTAINER]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PINNED = re.compile(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
OURS = "uses: OWNER/distcheck@COMMIT # fill in"  # a reader's to fill in
ADDRESS = "git+https://HOST/OWNER/distcheck@COMMIT"


def steps(path: Path) -> Iterator[dict[str, Any]]:
    document = yaml.safe_load(path.read_text())
    owners = [document["runs"]] if "runs" in document else document["jobs"].values()
    for owner in owners:
        yield from owner["steps"]


def unpinned(text: str) -> list[str]:
    """Other people's code that may change from day to day."""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines() if "uses:" in line]
    return [line for line in lines if not (PINNED.match(line) or line.startswith(OURS))]


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda path: path.name)
def test_what_is_used_is_pinned_and_no_script_has_an_expression(path: Path) -> None:
    assert unpinned(path.read_text()) == []
    assert [step["run"] for step in steps(path) if "${{" in step.get("run", "")] == []
    assert any("uses" in step for step in steps(path))


def test_a_tag_a_branch_and_a_short_commit_are_found() -> None:
    text = "- uses: a/b@v4\nuses: a/b@main # v1.2.3\nuses: a/b@1234567 # v1.2.3\n"
    assert unpinned(text) == ["uses: a/b@v4", *text.splitlines()[1:]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}
    assert document[True] == ["pull_request"]  # YAML takes `on` for true
    assert not any("permissions" in job for job in document["jobs"].values())
    checkouts = [s for s in steps(path) if s.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_the_inputs_that_a_workflow_gives_are_the_action_s() -> None:
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    given = [
        step["with"] for step in steps(WORKFLOWS[1]) if step["uses"] == "OWNER/distcheck@COMMIT"
    ]
    assert len(given) == 2
    assert all(with_.keys() <= inputs.keys() for with_ in given)
    for with_ in given:
        command = with_.get("command", inputs["command"]["default"])
        takes([command, *shlex.split(with_["arguments"])])


def takes(words: list[str]) -> None:
    """Raises where the command line does not take these words."""
    group = root_command.make_context("distcheck", ["list"])
    command = root_command.get_command(group, words[0])
    assert command is not None, words
    command.make_context(words[0], words[1:], parent=group)  # whose help option click keeps


def commands(path: Path) -> list[list[str]]:
    """Lines that run distcheck: of a script, in quotes, or as a hook's entry."""
    lines = re.findall(r"(?:run: |sh '|entry: |- |^ +)((?:\.venv/bin/)?distcheck [a-z].*)",
                       path.read_text(), re.MULTILINE)  # fmt: skip
    return [shlex.split(line.rstrip("'"), comments=True)[1:] for line in lines]


@pytest.mark.parametrize("name", ["github.yml", "gitlab-ci.yml", "Jenkinsfile"])
def test_an_example_says_what_the_command_line_takes(name: str) -> None:
    found = commands(CI / name)
    assert found
    for words in found:
        takes(words)


def test_the_hook_says_what_the_command_line_takes() -> None:
    (hook,) = yaml.safe_load(HOOKS.read_text())
    assert (hook["language"], hook["pass_filenames"]) == ("system", False)
    guide = (ROOT / "docs" / "gate.md").read_text()
    (shown,) = re.findall(r"```yaml\n# \.pre-commit-config\.yaml\n(.+?)```", guide, re.DOTALL)
    (used,) = yaml.safe_load(shown)["repos"][0]["hooks"]
    assert used["id"] == hook["id"]
    takes([*shlex.split(hook["entry"])[1:], *used["args"]])


def by_name(text: str) -> list[str]:
    """Installations by our name, which an index may give to anyone."""
    installs = re.findall(r"(?:pip|pipx|uv(?: tool)?|uvx) ?(?:install|add|run)? ([^\n`]*)", text)
    return [
        line for line in installs if re.search(r"(?:^|[\s'\"])distcheck(?:$|[\[=<>~'\"])", line)
    ]


@pytest.mark.parametrize("path", [*COPIED, *PAGES], ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_called_distcheck_is_installed_from_an_index(path: Path) -> None:
    text = path.read_text()
    assert by_name(text) == []
    assert set(re.findall(r"DISTCHECK(?: =|:) '?([^'\s]+)", text)) <= {ADDRESS}


def test_an_installation_by_name_is_found() -> None:
    lines = "pip install distcheck\npip install 'distcheck[mpi]'\nuvx distcheck==0.1\n"
    assert len(by_name(lines)) == 3
    assert (
        by_name("pip install .\npip install /opt/distcheck\nuvx --from . distcheck verify\n") == []
    )


def test_examples_take_a_cpu_build_of_torch_and_keep_pip_s_cache() -> None:
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    assert inputs["torch-index"]["default"].endswith("/whl/cpu")
    assert any(step.get("with", {}).get("path") == "~/.cache/pip" for step in steps(ACTION))
    for path in (CI / "github.yml", CI / "gitlab-ci.yml", CI / "Jenkinsfile"):
        assert "download.pytorch.org/whl/cpu" in path.read_text()
        assert "cache: pip" in path.read_text() or "PIP_CACHE_DIR" in path.read_text()


STAND_IN = f"""#!{sys.executable}
import json, sys
with open("calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(7 if "--strategy" in sys.argv else 0)
"""


def run_action(folder: Path, name: str, **given: str) -> "subprocess.CompletedProcess[str]":
    """A step of the action, by its name; `distcheck` and pip write down how they were called."""
    (step,) = [step for step in steps(ACTION) if step.get("name") == name]
    inputs = {
        key: one["default"] for key, one in yaml.safe_load(ACTION.read_text())["inputs"].items()
    }
    inputs |= {key.replace("_", "-"): value for key, value in given.items()}
    values = {
        **{f"inputs.{key}": value for key, value in inputs.items()},
        "runner.temp": str(folder),
    }
    environment = {
        key: re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: values[found[1]], value)
        for key, value in step["env"].items()
    }
    tools, script = folder / "tools", folder / "script.py"
    (tools / "pip").mkdir(parents=True, exist_ok=True)
    (tools / "pip" / "__init__.py").touch()
    (tools / "pip" / "__main__.py").write_text(STAND_IN)
    (tools / "distcheck").write_text(STAND_IN)
    (tools / "distcheck").chmod(0o755)
    script.write_text(step["run"])
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(tools)}
    environment["GITHUB_ACTION_PATH"] = "/the/action"
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True
    )


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_the_action_runs_what_it_was_asked_for_and_expands_nothing(tmp_path: Path) -> None:
    hostile = "--strategy 'my sync.py:sync' $(touch made) `touch made` ; touch made"
    assert run_action(tmp_path, "distcheck", arguments=hostile).returncode == 7
    (words,) = calls(tmp_path)
    folder = tmp_path / "distcheck"
    assert words[:5] == [
        "verify", f"--json={folder}/distcheck.json", f"--junit={folder}/distcheck.xml",
        f"--html={folder}/distcheck.html", "--github",
    ]  # fmt: skip
    assert words[5:8] == ["--strategy", "my sync.py:sync", "$(touch"]
    takes(words[:7])
    assert folder.is_dir()
    assert not (tmp_path / "made").exists()
    job = "-- torchrun --nproc-per-node 2 train.py"
    assert run_action(tmp_path, "distcheck", command="job", arguments=job).returncode == 0
    takes(calls(tmp_path)[1])
    refused = run_action(tmp_path, "distcheck", command="verify; touch made")
    assert refused.returncode == 1
    assert "it takes verify or job" in refused.stderr
    assert len(calls(tmp_path)) == 2


def test_the_action_installs_its_own_checkout_and_the_project(tmp_path: Path) -> None:
    step = "install distcheck and the project"
    index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    run_action(tmp_path, step)
    (tmp_path / "pyproject.toml").write_text("[tool.distcheck]\n")
    (tmp_path / "requirements.txt").touch()
    run_action(tmp_path, step)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    run_action(tmp_path, step, torch_index="")
    run_action(tmp_path, step, install="-e '.[a b]'")
    assert calls(tmp_path) == [
        ["install", *index, "/the/action"],
        ["install", *index, "/the/action", "-r", "requirements.txt"],
        ["install", "/the/action", "-r", "requirements.txt", "."],
        ["install", *index, "/the/action", "-e", ".[a b]"],
    ]


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["version"] == distcheck.__version__
    assert cited["license"] == project["license"]
    assert cited["authors"] == project["authors"]
    assert cited["abstract"].removesuffix(".") == project["description"]
