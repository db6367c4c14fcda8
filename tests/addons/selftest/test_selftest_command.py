"""The command `distcheck selftest`, on little of the zoo."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.world.command import COMMAND, Run, hear_interrupts
from tests.world.warm import distcheck

__all__ = ["distcheck"]


def test_catches_names_and_accuses_nobody(distcheck: Run, tmp_path: Path) -> None:
    words = ("-k", "missing_division", "-k", "correct.allreduce", "--quick")
    ran = distcheck("selftest", *words, "--json", "table.json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (
        "missing_division  caught  gradients (rounding, full batch float32)  missing-division  "
        "right" in ran.stdout
    )
    assert "mutants   1 planted: 1 caught, 0 missed; 1 named correctly" in ran.stdout
    assert "correct   4 cases: 4 passed, 0 false positives" in ran.stdout
    document = json.loads((tmp_path / "table.json").read_text())
    assert (document["exit_code"], document["counts"]["caught"]) == (0, 1)
    assert [row["verdict"] for row in document["rows"]] == ["caught", *["passed"] * 4]


def test_the_zoo_in_simulated_worlds(distcheck: Run, tmp_path: Path) -> None:
    words = ("-k", "missing_division", "-k", "does_not_wait", "-k", "correct.parameter_server")
    ran = distcheck("selftest", *words, "--backend", "simulated", "--json", "table.json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "simulated on cpu" in ran.stdout
    assert "mutants   2 planted: 2 caught, 0 missed; 2 named correctly" in ran.stdout
    assert "parameter_server is excluded: backend simulated cannot run this code" in ran.stdout
    document = json.loads((tmp_path / "table.json").read_text())
    assert document["backend"] == "simulated"
    assert {tuple(row["causes"]) for row in document["rows"] if row["kind"] == "mutant"} == {
        ("missing-division",), ("tensor-used-in-flight",),
    }  # fmt: skip


@pytest.mark.sweep  # a case that is left out is in tests/world/test_strategies.py
def test_a_strategy_that_cannot_run_one_of_its_cases_is_not_unknown(distcheck: Run) -> None:
    """The integers of workload `exact` do not fit into float16 at world 3."""
    ran = distcheck("selftest", "-k", "correct.ddp_fp16_hook")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "correct   6 cases: 5 passed, 0 false positives" in ran.stdout
    assert "ddp_fp16_hook-w3-exact-float32 is excluded: its gradients may reach" in ran.stdout


@pytest.mark.sweep
def test_ctrl_c_shows_the_table_so_far(tmp_path: Path) -> None:
    """The mutant is long done, and some of the strategies, when it comes."""
    front = subprocess.Popen(
        [*COMMAND, "selftest", "-k", "leaves_quietly", "-k", "correct.", "--json", "table.json"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear_interrupts,
    )  # fmt: skip
    family = psutil.Process(front.pid)
    seen: set[int] = set()
    while len(seen) < 40:  # the mutant takes a dozen processes
        seen |= {process.pid for process in family.children(recursive=True)}
        time.sleep(0.02)
    left = family.children(recursive=True)
    front.send_signal(signal.SIGINT)
    out, err = front.communicate(timeout=60)
    assert front.returncode == 130, err
    assert err.strip().endswith("nothing is left running")
    assert "leaves_quietly  caught  outcome" in out
    assert psutil.wait_procs(left, timeout=30)[1] == []
    document = json.loads((tmp_path / "table.json").read_text())
    assert (document["exit_code"], document["interrupted"]) == (130, True)


def test_says_that_the_zoo_is_not_installed(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, sys; from distcheck.cli import main\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if 'mutants' in name else find(name, *rest)\n"
        "sys.argv = ['distcheck', 'selftest']\n"
        "main()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 3
    assert ran.stderr.startswith("distcheck: the mutants are not installed")
