"""The steps of Dockerfile and devcontainer, without a container: in fresh virtual environments."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.command import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
DEVCONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
INSTRUCTIONS = [
    tuple(line.split(" ", 1)) for line in DOCKERFILE.splitlines() if line[:1] not in "#"
]
PINNED_PYTHON = re.compile(r"python:3\.\d+-slim-\w+$")


def of(kind: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == kind]


def test_the_dockerfile_is_what_these_steps_read() -> None:
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    assert {name for name, _ in INSTRUCTIONS} == known
    (image,), (entry_point,) = of("FROM"), of("ENTRYPOINT")
    assert PINNED_PYTHON.match(image)
    assert json.loads(entry_point) == ["distcheck"]
    assert all((ROOT / name).exists() for line in of("COPY") for name in line.split()[:-1])


def copied(image: Path) -> None:
    """What COPY puts into the image's folder."""
    image.mkdir()
    for line in of("COPY"):
        *names, target = line.split()
        for name in names:
            place = image / (name if target == "./" else target)
            if (ROOT / name).is_dir():
                kept_out = shutil.ignore_patterns("__pycache__", "build")
                shutil.copytree(ROOT / name, place, ignore=kept_out)
            else:
                shutil.copy(ROOT / name, place)


def fresh(folder: Path) -> dict[str, str]:
    """A new virtual environment. Torch comes from where pip looks here: a CPU build or another."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    own = {"PATH": f"{folder}/venv/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(folder / "venv")}
    kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "HOME"}
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    return {**kept, **own, "PIP_NO_COMPILE": "1", "TORCH_INDEX": index}


def bash(line: str, folder: Path, environment: dict[str, str]) -> str:
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, f"{line}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.mark.sweep
def test_the_image_verifies_and_passes_its_self_test(tmp_path: Path) -> None:
    """It holds the wheel alone: nothing of the checkout is on the path."""
    environment, image, work = fresh(tmp_path), tmp_path / "image", tmp_path / "work"
    copied(image)
    for line in of("RUN"):
        bash(line, image, environment)
    shutil.rmtree(image)
    work.mkdir()
    place = bash("python -c 'import distcheck; print(distcheck.__file__)'", work, environment)
    assert place.startswith(str(tmp_path / "venv"))
    assert "PASS" in bash("distcheck verify --strategy allreduce --world 2", work, environment)
    bash("distcheck selftest --quick", work, environment)


@pytest.mark.sweep
def test_the_devcontainer_can_run_the_tests(tmp_path: Path) -> None:
    environment = fresh(tmp_path)
    assert set(DEVCONTAINER["containerEnv"]) == {"TORCH_INDEX"}
    checkout = tmp_path / "checkout"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, names.stdout.decode().split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    bash(DEVCONTAINER["postCreateCommand"], checkout, environment)
    bash(
        "pytest -q tests/unit/test_architecture.py tests/unit/test_ci_files.py",
        checkout,
        environment,
    )
    bash("ruff check . && mkdocs build --strict && mypy --version", checkout, environment)
