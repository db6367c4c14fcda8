"""The engines of `examples/frameworks/`: right ones pass, and planted bugs are caught and named.

They import large libraries in every rank, so all of it is for the sweep, where they are installed
(the extra `frameworks`).
"""

import ast
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest

import distcheck
from distcheck.records import Report
from tests.world.command import ROOT
from tests.world.test_verify import assert_everything_compared

FOLDER = ROOT / "examples" / "frameworks"
BUGS = tomllib.loads((FOLDER / "planted.toml").read_text())["bug"]
PACKAGES = {
    "with_accelerate": "accelerate", "with_deepspeed": "deepspeed", "with_fabric": "lightning",
    "with_fairscale": "fairscale", "with_megatron": "megatron",
}  # fmt: skip
RIGHT: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PACKAGES if name != "with_deepspeed"),
    *(("with_deepspeed", {"stage": stage}) for stage in range(4)),
]
SMALL = "tests.mutants.small:Small"


def verify(file: Path, *, world: int = 2, **arguments: Any) -> Report:
    if importlib.util.find_spec(PACKAGES[file.stem.partition("__")[0]]) is None:
        pytest.skip("not installed; pip install '.[frameworks]'")
    return distcheck.verify(
        f"{file}:initialize", world=world, workload=SMALL, dtype="float32", steps=3, form="engine",
        arguments=arguments, separate=False, batch=252, deadline_s=120.0,
    )  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("name", "arguments"), RIGHT, ids=lambda x: str(x))
def test_a_right_engine_passes(name: str, arguments: dict[str, Any], world: int) -> None:
    report = verify(FOLDER / f"{name}.py", world=world, **arguments)
    assert_everything_compared(report)


@pytest.mark.sweep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_a_planted_bug_is_named(bug: dict[str, str], tmp_path: Path) -> None:
    report = verify(plant(bug, tmp_path))
    (case,) = report.cases
    assert case.verdict == "fail"
    assert bug["cause"] in {found.cause for found in case.diagnosis}


def plant(bug: dict[str, str], folder: Path) -> Path:
    """A copy of an engine's file with one edit."""
    text = (FOLDER / bug["file"]).read_text()
    assert text.count(bug["find"]) == 1, bug["name"]
    number = [other["name"] for other in BUGS].index(bug["name"])
    planted = folder / f"{Path(bug['file']).stem}__{number}.py"
    planted.write_text(text.replace(bug["find"], bug["put"]))
    return planted


def test_every_edit_fits_its_file_and_every_file_is_short(tmp_path: Path) -> None:
    for bug in BUGS:
        ast.parse(plant(bug, tmp_path).read_text())
    assert {Path(bug["file"]).stem for bug in BUGS} == set(PACKAGES)
    for name in PACKAGES:
        text = (FOLDER / f"{name}.py").read_text()
        code = text[text.index('"""', 3) + 3 :].split("\n")
        assert len([line for line in code if line.strip()]) <= 30, name
