"""Which cases failed when they were last run, from reports that are kept."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distcheck.plan.provenance import Provenance
from distcheck.records import Case
from distcheck.store import earlier_runs, run_folder


def case(strategy: str, workload: str, world: int = 4) -> Case:
    return Case(
        id=f"{strategy}-{workload}-{world}", strategy=strategy, world=world, workload=workload
    )


A, B = [case("a", "mlp"), case("a", "cnn")], [case("b", "mlp"), case("b", "cnn")]


def keep(runs: Path, name: str, *judged: tuple[Case, str]) -> None:
    folder = runs / name
    folder.mkdir(parents=True)
    cases: list[dict[str, Any]] = [
        {**msgspec.to_builtins(one), "verdict": verdict} for one, verdict in judged
    ]
    (folder / "report.json").write_text(json.dumps({"cases": cases, "verdict": "fail"}))


def test_the_last_verdict_counts_and_an_unknown_is_none(tmp_path: Path) -> None:
    keep(tmp_path, "1", (A[0], "fail"), (A[1], "fail"), (B[0], "pass"), (B[1], "fail"))
    keep(tmp_path, "2", (A[0], "pass"), (A[1], "unknown"), (B[0], "fail"))
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "report.json").write_text('{"cases": [{"verdict": 3')
    found = earlier_runs.ids_of_failed_cases(tmp_path, [*A, *B])
    assert found == {A[1].id, B[0].id, B[1].id}
    assert not earlier_runs.ids_of_failed_cases(tmp_path, [case("b", "mlp", world=2)])
    assert not earlier_runs.ids_of_failed_cases(tmp_path / "none", A)


def test_a_run_that_came_with_the_folder_is_older_than_all_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name does not prove its date: its verdict would hide that of the last run here."""
    monkeypatch.chdir(tmp_path)
    runs = Path(".distcheck/runs")
    for name, verdict in (("20260101-1-1", "pass"), ("20260102-1-1", "fail"), ("zz", "pass")):
        keep(runs, name, (A[0], verdict))
        (runs / name / "cases").mkdir()
        file = runs / name / "cases" / "a.json"
        run_folder.write_case(file, A[0], Provenance(environment={}, digests={"strategy": "d"}))
        if name == "zz":
            file.write_text(re.sub('"seal": ".*"', '"seal": "00"', file.read_text()))
    assert [run.name for run in run_folder.kept_runs()] == ["zz", "20260101-1-1", "20260102-1-1"]
    assert earlier_runs.ids_of_failed_cases(runs, A) == {A[0].id}


def test_what_failed_goes_first_and_its_siblings_beside_it() -> None:
    failed = {B[1].id}
    assert earlier_runs.with_failed_first([*A, *B], failed) == [B[1], B[0], *A]
    assert earlier_runs.with_failed_first([*A, *B], failed | {A[1].id}) == [A[1], A[0], B[1], B[0]]


def test_the_others_are_left_out_with_the_reason() -> None:
    why = "you passed --last-failed, and it did not fail in its last run"
    assert earlier_runs.reasons_for_not_failed(A, {A[0].id}) == {A[1].id: why}
