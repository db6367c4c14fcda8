"""Runs that end at the first failure, and runs of what failed before."""

import json
import re
from pathlib import Path

import pytest

from tests.world.command import QUICK, SURE, Run, complaints
from tests.world.warm import distcheck as distcheck


def verdicts(file: Path) -> list[str]:
    cases = json.loads(file.read_text())["cases"]
    return [f"{c['case']['strategy']} {c['verdict']}" for c in cases]


def test_a_run_ends_at_its_first_failure(distcheck: Run, tmp_path: Path) -> None:
    worlds = [word for n in "3456" for word in ("--world", n)]
    both = ("verify", "--strategy", "bad.py:no_sync", "--strategy", "bad.py:good", *SURE)
    first = distcheck(*both, *worlds, "--fail-fast", "--json", "first.json")
    assert first.returncode == 1
    judged = verdicts(tmp_path / "first.json")
    assert judged[0] == "bad.py:no_sync fail"
    assert judged[-1] == "bad.py:good unknown", "what had begun may have been judged"
    why = (
        r"not judged because of --fail-fast: mlp:small float32 of bad.py:no_sync with \d ranks "
        r"has fail"
    )
    assert re.search(why, " ".join(first.stdout.split()))

    again = ("verify", "--strategy", "bad.py:good", "--strategy", "bad.py:no_sync", *SURE)
    whole = distcheck(*again, "--failed-first", "--json", "whole.json")
    assert verdicts(tmp_path / "whole.json") == ["bad.py:no_sync fail", "bad.py:good pass"]
    assert complaints(whole.stderr) == [
        "distcheck: 1 of 2 cases failed in their last run here; they are run first"
    ]

    only = distcheck(*again, "--last-failed", "--json", "only.json")
    assert verdicts(tmp_path / "only.json") == ["bad.py:no_sync fail"]
    left_out = json.loads((tmp_path / "only.json").read_text())["left_out"]
    assert ["you passed --last-failed" in why for why in left_out.values()] == [True]
    assert only.returncode == 1


@pytest.mark.sweep
def test_where_nothing_failed_all_is_run(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:good", *QUICK, "--last-failed")
    assert ran.returncode == 0
    (said,) = complaints(ran.stderr)
    assert said == (
        "distcheck: this case did not fail in the last run here (.distcheck/runs); it is run"
    )
    assert "--last-failed" not in ran.stdout
