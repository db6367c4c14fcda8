"""Which cases failed when they were last run, from reports that are kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distcheck.records import Case
from distcheck.store import earlier_runs, run_folder


def case(strategy: str, workload: str, world: int = 4) -> Case:
    return Case(
        id=f"{strategy}-{workload}-{world}", strategy=strategy, world=world, workload=workload
    )


A, B = [case("a", "mlp"), case("a", "cnn")], [case("b", "mlp"), case("b", "cnn")]


def keep(runs: Path, name: str, *judged: tuple[Case, str]) -> None:
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    cases: list[dict[str, Any]] = [
        {"case": msgspec.to_builtins(one), "verdict": verdict} for one, verdict in judged
    ]
    report = {"cases": cases, "verdict": "fail", "environment": {}}
    (folder / "report.json").write_text(json.dumps(report))


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
    """Its name does not prove its date: its verdict would hide that of the last run here, and
    unfinished runs of later names would push out those of this user.
    """
    monkeypatch.chdir(tmp_path)
    runs = Path(".distcheck/runs")
    own = [run_folder.RunStore.of_own(keep_everything=False).folder for _ in range(2)]
    for place, verdict in zip(own, ("pass", "fail"), strict=True):
        keep(runs, place.name, (A[0], verdict))
        store = run_folder.RunStore(place, keep_everything=False)
        store.write_report((place / "report.json").read_text())
        (place / "cases").mkdir()
    keep(runs, "zz", (A[0], "pass"))
    unfinished = [runs / f"99999999-{number}-999999999" for number in range(12)]
    for place in (runs / "zz", *unfinished):
        (place / "cases").mkdir(parents=True)
        shutil.copy(own[1] / "seal", place)  # is valid for one name
    assert run_folder.stored_runs()[-2:] == own
    assert earlier_runs.ids_of_failed_cases(runs, A) == {A[0].id}
    run_folder.RunStore.of_own(keep_everything=False)
    assert [place.exists() for place in own] == [True, True]
    assert sum(place.exists() for place in unfinished) == 7


def test_a_run_whose_report_was_replaced_is_not_the_last_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal covered only the name of the folder, which may have been lent."""
    monkeypatch.chdir(tmp_path)
    runs = [run_folder.RunStore.of_own(keep_everything=False) for _ in range(2)]
    for one in runs:
        one.write_report('{"verdict":"fail"}')
        assert run_folder.age_key(one.folder)[0]
    (runs[1].folder / "report.json").write_text('{"verdict":"pass"}')
    assert [run_folder.age_key(one.folder)[0] for one in runs] == [True, False]
    (runs[1].folder / "report.json").unlink()
    assert not run_folder.age_key(runs[1].folder)[0]


def test_what_failed_goes_first_and_its_siblings_beside_it() -> None:
    failed = {B[1].id}
    assert earlier_runs.with_failed_first([*A, *B], failed) == [B[1], B[0], *A]
    assert earlier_runs.with_failed_first([*A, *B], failed | {A[1].id}) == [A[1], A[0], B[1], B[0]]


def test_the_others_are_left_out_with_the_reason() -> None:
    why = "you passed --last-failed, and it did not fail in its last run"
    assert earlier_runs.reasons_to_skip_passed(A, {A[0].id}) == {A[1].id: why}
