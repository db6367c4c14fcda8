"""A release: builds are byte-identical, the workflow publishes only for a tag, versions agree."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.unit.test_ci_files import steps, unpinned

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
RECIPE = ROOT / ".ci" / "conda" / "recipe.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages of conda-forge with another name than on PyPI.
OF_CONDA = {"torch": "pytorch", "xxhash": "python-xxhash"}


@pytest.mark.parametrize("target", ["sdist", "wheel"])
def test_two_builds_are_byte_identical(target: str, tmp_path: Path) -> None:
    """In folders of different names, with different times and modes of their files."""
    built = []
    for name, umask in (("one", 0o022), ("other", 0o077)):
        folder = tmp_path / name
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".git", "build", ".*cache")
        for part in ("distcheck", "strategies", "tests/mutants"):
            shutil.copytree(
                ROOT / part, folder / part, ignore=ignore, copy_function=shutil.copyfile
            )
        for part in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
            shutil.copyfile(ROOT / part, folder / part)
        words = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", "made"]
        subprocess.run(words, cwd=folder, check=True, capture_output=True, umask=umask)
        (file,) = (folder / "made").iterdir()
        built.append((file.name, file.read_bytes()))
    assert built[0] == built[1]


def test_the_workflow_is_pinned_and_publishes_only_for_a_tag() -> None:
    text = WORKFLOW.read_text()
    assert unpinned(text) == []
    assert [step["run"] for step in steps(WORKFLOW) if "${{" in step.get("run", "")] == []
    document = yaml.safe_load(text)
    assert document[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    assert document["permissions"] == {"contents": "read"}
    jobs = document["jobs"]
    assert "permissions" not in jobs["build"]
    assert [name for name, job in jobs.items() if job.get("if") != "github.ref_type == 'tag'"] == [
        "build"
    ]
    assert jobs["publish"]["needs"] == "build"
    assert "secrets." not in text
    assert any(".ci/release dist" in step.get("run", "") for step in jobs["build"]["steps"])


def test_the_dry_run_is_part_of_every_check() -> None:
    assert '.ci/release "$scratch/wheel"' in (ROOT / ".ci" / "run").read_text()


def test_a_tag_that_names_another_version_ends_a_release(tmp_path: Path) -> None:
    """Builds and checks are replaced by programs that do nothing."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    place, tools = tmp_path / "checkout", tmp_path / "tools"
    for name in (".ci/release", "distcheck/__init__.py", "CHANGELOG.md", "pyproject.toml",
                 "docs/reference/python.md"):  # fmt: skip
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    tools.mkdir()
    (tools / "python").write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*twine* | *rattler*) ;;\n"
        '*build*) mkdir -p "$4"; echo made > "$4/made.whl"; echo made > "$4/made.tar.gz" ;;\n'
        f'*) exec {sys.executable} "$@" ;;\nesac\n'
    )
    (tools / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            words, cwd=place, env=environment, capture_output=True, text=True, timeout=60
        )

    git = ("git", "-c", "user.name=x", "-c", "user.email=x@x")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "one"), ("tag", "v0.0.9")):
        assert run(*git, *words).returncode == 0
    page = place / "docs" / "reference" / "python.md"
    page.write_text(page.read_text() + "### added\n")
    run(*git, "commit", "-qam", "two")
    dry = run(".ci/release", "made")
    assert dry.returncode == 0, dry.stderr
    assert "public names, options and settings since v0.0.9: 1 lines changed" in dry.stdout
    assert "+### added" in (place / "made" / "names.diff").read_text()
    assert "before a release: remove the classifier" in dry.stderr
    tagged = run(".ci/release", "made", "v9.9.9")
    assert tagged.returncode == 1
    assert "before a release: the tag is v9.9.9 and the version is 0.1.0" in tagged.stderr


def test_the_recipe_has_the_dependencies_of_the_package() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    found = dict(
        re.fullmatch(r"([\w-]+) (>=.*)", one).groups() for one in recipe["requirements"]["run"]
    )  # type: ignore[union-attr]
    assert found.pop("python") == PROJECT["requires-python"]
    wanted = dict(re.fullmatch(r"([\w-]+)(>=.*)", one).groups() for one in PROJECT["dependencies"])  # type: ignore[union-attr]
    assert found == {OF_CONDA.get(name, name): version for name, version in wanted.items()}
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert f"version: {recipe['context']['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_pages_are_written_for_any_generator_with_an_index_for_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.setattr(sys, "argv", ["site_pages.py", str(tmp_path / "pages")])
    importlib.import_module("site_pages").main()
    index = (tmp_path / "pages" / "llms.txt").read_text()
    links = re.findall(r"^- \[[^\]]+\]\(https://[^/]+/(.+?)\): (.*)$", index, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page for page, _ in links}
    assert [page for page, sentence in links if len(sentence) < 10] == []
    for page, _ in links:
        text = (tmp_path / "pages" / page).read_text()
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            there = (tmp_path / "pages" / page).parent / target
            assert there.exists(), f"{page} links to {target}"
