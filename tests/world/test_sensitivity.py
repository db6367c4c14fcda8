"""A pass says which mistakes it would have shown; where it could show one nowhere, it is none."""

import json
import re
from html import unescape
from typing import Any

import pytest

import distcheck
from distcheck.records import CheckResult, Report
from distcheck.records.mistakes import MISTAKES
from distcheck.reports.brief import next_step
from distcheck.reports.html_report import render
from distcheck.reports.json_report import render_json
from distcheck.reports.terminal import render_text

pytestmark = pytest.mark.usefixtures("no_rerun")

HERE = "tests.world.silent"


def check(report: Report, name: str, layer: str = "-", *, case: int = 0) -> CheckResult:
    return next(r for r in report.cases[case].checks if (r.check, r.layer) == (name, layer))


def run(strategy: str, workload: str, **more: Any) -> Report:
    return distcheck.verify(f"{HERE}:{strategy}", workload=f"{HERE}:{workload}", world=4, **more)


def test_code_that_does_nothing_is_unknown_where_ranks_are_alike() -> None:
    report = run("nothing", "Alike")
    assert report.verdict == "unknown"
    assert int(report.exit_code) == 5
    found = check(report, "sensitivity")
    assert found.verdict == "unknown"
    assert found.reason == (
        "no tensor would have revealed a missing sync or a dropped rank: gradients are the same on "
        "every rank"
    )
    assert run("mean", "Alike").verdict == "unknown", "right code is not known to be right either"


def test_dead_tensors_do_not_count() -> None:
    report = run("mean", "Dead")
    assert report.verdict == "pass"
    for layer in ("rounding", "full batch float32"):
        found = check(report, "gradients", layer)
        assert found.compared.tensors == 1
        assert found.insensitive.tensors == 3
    found = check(report, "sensitivity")
    assert found.compared.tensors == 1
    assert "dead.0, dead.1, dead.2 could reveal no mistake (gradient zero on every rank)" in (
        found.reason
    )


def test_nothing_but_dead_tensors_is_unknown() -> None:
    report = run("mean", "AllDead")
    assert report.verdict == "unknown"
    assert check(report, "gradients", "rounding").verdict == "unknown"
    assert "gradients are zero on every rank" in check(report, "sensitivity").reason


def test_an_accepted_deviation_says_what_it_hides() -> None:
    hidden = run("without_rank_2", "Dead", accept="quantized:2")
    assert hidden.verdict == "unknown"
    assert "a dropped rank" in check(hidden, "sensitivity").reason
    assert "--accept quantized:2 allows it" in check(hidden, "sensitivity").reason
    assert run("without_rank_2", "Dead", accept="quantized:8").verdict == "fail"
    fine = run("mean", "Dead", accept="quantized:8")
    assert fine.verdict == "pass"
    said = "with --accept quantized:8 a scale error is detected from"
    assert said in check(fine, "sensitivity").reason
    assert said in " ".join(render_text(fine, width=100, verbose=True).split())


def test_a_missing_sync_is_not_partial_where_the_rest_has_no_gradient() -> None:
    report = run("nothing", "LoRA")
    assert [found.cause for found in report.cases[0].diagnosis] == ["missing-sync"]
    assert "the only parameter that could show it (1 could not)" in (
        report.cases[0].diagnosis[0].evidence
    )


def test_the_report_of_a_pass() -> None:
    report = distcheck.verify("allreduce", world=4, workload=["exact", "mlp"])
    assert report.verdict == "pass"
    for at in range(3):
        found = check(report, "sensitivity", case=at)
        assert found.verdict == "pass"
        assert all(len(one.shown["lost-rank"]) == 4 for one in found.shown.values())
    screen = " ".join(render_text(report, width=100, verbose=True).split())
    assert (
        "sensitivity: of 18 tensors, all would have revealed a missing sync, a dropped rank, a "
        "duplicated rank, a missing division, a second division and a gradient from the previous "
        "step; "
    ) in screen
    assert screen.count("sensitivity: ") == 1
    assert re.search(r"one that is off by \S+ in float32, \S+ in float64 or more", screen)
    of_case = check(report, "sensitivity", case=1).reason
    assert of_case.startswith(
        "of 6 tensors, all would have revealed a missing sync, a dropped rank, "
    )
    document = json.loads(render_json(report))
    by_name = {c["check"]: c for c in document["cases"][1]["checks"]}
    said = by_name["sensitivity"]["sensitivity"]
    assert set(said["mistakes"]) <= set(MISTAKES)
    assert said["mistakes"]["lost-rank"] == {"tensors": 6, "of": 6, "not_in": []}
    assert all(0 < factor < 1e-5 for factor in said["wrong_factor"].values())
    assert said["no_mistake_shows_in"] == []
    page = render(document)
    for at in range(3):  # each case by itself
        reason = check(report, "sensitivity", case=at).reason
        assert reason.partition(";")[0] in " ".join(unescape(re.sub(r"<[^>]*>", "", page)).split())


def does_nothing(model: Any) -> None:
    pass


def test_a_world_of_one_exchanges_nothing() -> None:
    """Nor is that a pass: code that does nothing has the same gradients there."""
    for strategy in ("allreduce", does_nothing):
        report = distcheck.verify(strategy, world=1, workload="mlp:small", dtype="float32")
        assert report.verdict == "unknown"
        reason = check(report, "sensitivity").reason
        assert reason.startswith(
            "a single rank has nothing to synchronize, so even a missing sync would"
        )
        assert next_step(report).endswith(" --world 2")
