"""`--on slurm` with submitit's own executor of this machine, in place of a cluster's sbatch."""

import json
from pathlib import Path

import pytest

from tests.world.command import QUICK, Run, complaints
from tests.world.command import distcheck as distcheck

WORDS = ("verify", "--strategy", "bad.py:good", "--strategy", "bad.py:no_sync", *QUICK)


@pytest.mark.sweep
def test_parts_are_judged_and_joined(distcheck: Run, tmp_path: Path) -> None:
    ran = distcheck(*WORDS, "--on", "slurm://local", "--json", "whole.json")
    assert ran.returncode == 1, ran.stderr
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [case["verdict"] for case in whole["cases"]] == ["pass", "fail"]
    assert [part["shard"] for part in whole["parts"]] in ([1, 2], [2, 1])
    assert "2 parts on slurm; code: it is found by its path" in ran.stderr
    assert "1 failed, 1 passed" in ran.stdout
    assert not complaints(ran.stderr)


def test_what_goes_with_no_engine_is_said(distcheck: Run) -> None:
    ran = distcheck(*WORDS, "--on", "slurm", "--shard", "1/2")
    assert ran.returncode == 2
    assert "--on cannot be combined with --shard: it splits the whole matrix" in ran.stderr
