"""docs/testing.md: what it shows runs as it stands, and ends and prints as the page says."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from distcheck import backends
from distcheck.machine import devices
from distcheck.testing.marker import WorldOptions
from tests.world import warm

NO_MPI = backends.missing("mpi")  # asked here: pytester undoes what a test imports
PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
MINE = """
import torch.distributed as dist

class Mine:
    def sync(self, model, step):
        for parameter in model.parameters():
            parameter.grad *= step.weight
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size
"""


def block(start: str) -> str:
    """The code block of the page that has these words."""
    (found,) = [
        text for text in re.findall(r"```\w*\n(.+?)\n```", PAGE, re.DOTALL) if start in text
    ]
    return str(found)


def plain(text: str) -> str:
    """Without what differs from run to run: widths of rules, seconds, which rank was first."""
    text = re.sub(r"^([_=]+) (.*?) \1?[_=]+$", r"\2", text, flags=re.MULTILINE)
    return re.sub(r"<rank \d", "<rank 0", re.sub(r"in [\d.]+s", "in 0s", text))


def run(*words: str, cwd: Path) -> pytest.RunResult:
    """As a person would in that folder, in a process that has imported torch."""
    done = warm.run("-p", "no:cacheprovider", *words, cwd=cwd, program="pytest")
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), [], 0.0)


def test_the_bug_that_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    (tmp_path / "test_mean.py").write_text(block("# test_mean.py") + "\n")
    name, *words = shlex.split(block("pytest test_mean.py"))
    assert name == "pytest"
    ran = run(*words, cwd=tmp_path)
    ran.assert_outcomes(passed=1, failed=1)
    shown = plain(block("all 4 ranks failed:")).split("\n...\n")
    assert len(shown) == 4
    assert re.search(r"\n(?:.*\n)*?".join(map(re.escape, shown)), plain(ran.stdout.str()))


def test_every_option_of_the_marker_is_shown() -> None:
    options = {field.name for field in dataclasses.fields(WorldOptions)} - {"size", "sizes"}
    assert set(re.findall(r"(\w+)=", block("four new ranks for this test"))) == options


@pytest.mark.sweep
def test_what_the_marker_takes(tmp_path: Path) -> None:
    lines = block("four new ranks for this test").splitlines()
    if NO_MPI:
        lines = [line for line in lines if "mpi" not in line]
    tests = [
        f"{line}\ndef test_{number}(world):\n    assert world.gather(1) == [1] * world.size\n"
        for number, line in enumerate(lines)
    ]
    (tmp_path / "test_it.py").write_text("import pytest\n" + "\n".join(tests))
    ran = run(cwd=tmp_path)
    without = int(devices.gpu_count() == 0)
    ran.assert_outcomes(passed=len(lines) + 1 - without, skipped=without)


@pytest.mark.sweep
def test_a_matrix_of_strategies(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(**{"my_pkg/__init__": "", "my_pkg/sync": MINE})
    pytester.makepyfile(test_my_sync="import pytest\n" + block("distcheck.verify("))
    ran = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    ran.assert_outcomes(passed=6)
