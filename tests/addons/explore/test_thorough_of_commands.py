"""`--thorough` with ranks: what a search beside the cases finds is part of the verdict."""

import json
import re
from pathlib import Path

import pytest

import distcheck as framework
from distcheck.errors import CannotRunError, ExitCode
from distcheck.verification import limits
from distcheck.workloads.cells import CELLS
from tests.world.command import Run
from tests.world.warm import distcheck

__all__ = ["distcheck"]
PLANTED = str(Path(__file__).parents[2] / "explored.py")
OTHERS = [name for name in CELLS if name != "tied_weights"]
WITHOUT = [word for name in OTHERS for word in ("--without", name)]


@pytest.mark.sweep
def test_what_only_a_search_finds_fails_the_run(distcheck: Run, tmp_path: Path) -> None:
    strategy = f"{PLANTED}:only_at_three"
    words = ("--world", "2", "--workload", "mlp", "--dtype", "float32", "--no-separate")
    ran = distcheck("verify", "--strategy", strategy, *words, "--thorough", *WITHOUT,
                    "--explore-s", "100", "--json", "r.json")  # fmt: skip
    assert ran.returncode == ExitCode.MISMATCH, ran.stdout + ran.stderr
    assert re.search(
        r"distcheck: \d+ cases in world 2, .*; explore .* for 100 s; about", ran.stderr
    )
    document = json.loads((tmp_path / "r.json").read_text())
    (explored,) = document["explored"]
    assert explored["verdict"] == "fail"
    (found,) = (case for case in document["cases"] if case["case"]["id"] in explored["found"])
    assert (found["case"]["world"], found["verdict"]) == (3, "fail")
    assert all(case["verdict"] == "pass" for case in document["cases"] if case != found)
    assert any("found by explore" in note for note in found["notes"])
    assert "explore: " in ran.stdout
    assert distcheck(*found["replay"].split()[1:]).returncode == ExitCode.MISMATCH
    merged = distcheck("merge", "r.json")
    assert merged.returncode == ExitCode.MISMATCH, merged.stdout + merged.stderr


@pytest.mark.sweep
def test_a_search_that_finds_nothing_passes_and_says_how_far_it_went() -> None:
    report = framework.verify(
        "ddp", world=2, workload="mlp", dtype="float32", thorough=True, without=OTHERS,
        explore_s=1, separate=False,
    )  # fmt: skip
    report.raise_for_verdict()
    (explored,) = report.explored
    assert explored.verdict == "pass"
    assert explored.passed + explored.insensitive == explored.cases > 0
    assert "absent" in explored.left_out, "DDP declines what goes without a gradient"


@pytest.mark.sweep
def test_only_a_requested_world_may_exceed_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    check_room = limits.check_resources

    def little_room(case, *about, **more) -> None:  # type: ignore[no-untyped-def]
        if case.world > 4:
            raise CannotRunError("needs about 9 GiB of memory; 1 GiB are available")
        check_room(case, *about, **more)

    monkeypatch.setattr(limits, "check_resources", little_room)
    asked = {"workload": "mlp", "dtype": "float32", "separate": False, "explore_s": 0,
             "thorough": True, "without": list(CELLS)}  # fmt: skip
    report = framework.verify("allreduce", **asked)  # type: ignore[arg-type]
    report.raise_for_verdict()
    assert {case.case.world for case in report.cases} == {2, 3, 4}
    assert {name: why for name, why in report.left_out.items() if "mlp" in name} == {
        f"allreduce-w{world}-mlp-float32": "needs about 9 GiB of memory; 1 GiB are available"
        for world in (5, 6)
    }
    notes = [note for case in report.cases for note in case.notes]
    assert any("world 5: needs about 9 GiB" in note for note in notes)
    with pytest.raises(CannotRunError, match="9 GiB"):
        framework.verify("allreduce", world=5, **asked)  # type: ignore[arg-type]
