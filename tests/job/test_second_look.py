"""Whole commands: a failure that nothing explains is looked at again, by module; and two jobs whose
operators were heard.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.job.test_by_module import NET
from tests.job.test_divergent_ops import HEAD, TRAIN
from tests.job.test_examples import cli
from tests.job.test_modules_watched import LOOP


@pytest.mark.sweep
def test_a_failure_that_nothing_explains_gets_a_second_look(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NET)
    ran = cli(
        "job", tmp_path, "--steps", "2", "--json", "report.json", "--html", "page.html", "--nproc",
        "2", "--", sys.executable, "train.py", "scaled",
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "first wrong module: blocks.1 (Block)" in ran.stdout
    case = json.loads((tmp_path / "report.json").read_text())["cases"][0]
    assert [one["cause"] for one in case["diagnosis"]] == ["module-differs"]
    assert (case["modules"]["name"], case["modules"]["is_found"]) == ("blocks.1", True)
    assert any("with its modules watched" in note for note in case["notes"])
    assert '<ul class="modules">' in (tmp_path / "page.html").read_text()


@pytest.mark.sweep
def test_two_jobs_name_the_operator(tmp_path: Path) -> None:
    """The same command twice, with noise from a generator that it seeds by the clock."""
    seeds = "import time\nsys.argv[1:] = ['draws', str(time.time_ns() % 10**9)]\n"
    (tmp_path / "train.py").write_text(HEAD + seeds + TRAIN + LOOP)
    for name in ("one", "two"):
        cli("job", tmp_path, "--steps", "2", "--save", name, "--ops", "--no-reference", "--",
            sys.executable, "train.py")  # fmt: skip
    ran = cli("compare", tmp_path, "one", "two", "--json", "both.json", "--html", "page.html")
    assert ran.stdout.count("first divergent operator: aten.randn.generator in 1"), ran.stdout
    case = json.loads((tmp_path / "both.json").read_text())["cases"][0]
    assert case["modules"]["name"] == "1"
    assert case["op"].startswith("first divergent operator: aten.randn")
    assert '<ul class="modules">' in (tmp_path / "page.html").read_text()


def test_operators_are_for_a_recording_that_is_kept(tmp_path: Path) -> None:
    ran = cli("job", tmp_path, "--ops", "--", "touch", "was-run")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "give --save as well" in ran.stderr
    assert not (tmp_path / "was-run").exists()
