"""What checks sum up for pictures: a picture must not mislead where a verdict does not."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from distcheck.judge.checks.comparison import (
    compare_bitwise,
    compare_by_norm,
    compare_within,
    hex_bits,
)
from distcheck.judge.checks.merging import merge_results
from distcheck.judge.checks.tally import Tally
from distcheck.plan.provenance import Provenance, changes_affecting_bits
from distcheck.records import Case, CaseReport
from distcheck.reports.json_report import error_map
from distcheck.store.earlier_runs import changes_since_last_pass
from distcheck.store.run_folder import RunStore
from tests import documents


def tally() -> Tally:
    return Tally("gradients", "bitwise")


def test_expected_in_float64_is_rounded_to_the_dtype() -> None:
    assert hex_bits(0.1, torch.float32) == "3dcccccd"
    assert hex_bits(0.1, torch.bfloat16) == "3dcd"
    assert hex_bits(-0.0, torch.float64) == "8000000000000000"
    assert hex_bits(1e300, torch.float32) == ""


def test_bits_that_differ_where_numbers_do_not_are_no_equality() -> None:
    for dtype in (torch.float32, torch.complex64):
        zero = torch.zeros(2, dtype=dtype)
        sums = tally()
        sums.add(compare_bitwise(-zero, zero), parameter="w", rank=0, step=0)
        assert sums.result().shares == {"w": {0: "inf"}}


def test_shares_are_the_worst_of_all_ranks() -> None:
    sums = tally()
    bound = torch.full((3,), 0.5, dtype=torch.float64)
    for rank, off in enumerate((0.1, 0.4, 0.2)):
        actual = torch.full((3,), 1.0 + off)
        comparison = compare_within(actual, torch.ones(3, dtype=torch.float64), bound)
        sums.add(comparison, parameter="w", rank=rank, step=0)
    norm = compare_by_norm(torch.tensor([3.0, 4.0]), torch.zeros(2), 2.5)
    sums.add(norm, parameter="v", rank=0, step=0)
    found = sums.result()
    assert found.shares["w"][0] == pytest.approx(0.8, rel=1e-6)
    assert found.shares["v"][0] == 2.0
    assert not found.in_bits


def test_parts_of_several_judges_are_put_together() -> None:
    parts = []
    for step in (1, 0):
        sums = tally()
        sums.add(compare_bitwise(torch.ones(2), torch.ones(2)), parameter="w", rank=0, step=step)
        parts.append(sums.result())
    found = error_map(merge_results(parts))
    assert (found.rows, found.steps) == (("==",), (0, 1))


def test_what_was_not_compared_is_no_equality() -> None:
    sums = tally()
    same = compare_bitwise(torch.ones(1), torch.ones(1))
    sums.add(same, parameter="a", rank=0, step=0)
    sums.add(same, parameter="b", rank=0, step=1)
    sums.fail("it is missing", parameter="b", step=1)
    assert error_map(sums.result()).rows == ("=.", ".x")


def test_a_case_that_is_noted_for_a_restart_keeps_them() -> None:
    """Under torchrun, a finished case goes to a file and back (`store.write_finished`)."""
    for report in (documents.vgg11(steps=4), documents.crash()):
        text = msgspec.json.encode(report)
        assert msgspec.json.decode(text, type=CaseReport) == report


def keep(
    runs: Path, name: str, verdict: str, strategy: str, environment: dict[str, Any],
    digests: dict[str, str] | None = None,
) -> None:  # fmt: skip
    (runs / name / "cases").mkdir(parents=True)
    judged = {"verdict": verdict, "case": {"id": "saved", "strategy": strategy, "world": 2}}
    document = {"verdict": verdict, "environment": environment, "cases": [judged]}
    (runs / name / "report.json").write_text(json.dumps(document))
    case = Case(id="saved", strategy=strategy, world=2)
    made = Provenance(environment=environment, digests=digests or {})
    RunStore(runs / name, keep_everything=False).write_case(case, made)


def test_the_last_green_run_is_the_newest_that_passed_the_strategy(tmp_path: Path) -> None:
    keep(tmp_path, "1", "pass", "mine", {"torch": "2.11"})
    green = {"torch": "2.12", "threads": 1, "libraries": {"x": "1"}, "cpu": "A B"}
    code = {"strategy": "aa", "workload": "bb"}
    keep(tmp_path, "2", "pass", "mine", green, code)
    keep(tmp_path, "3", "pass", "other", {"torch": "2.14"})
    keep(tmp_path, "4", "fail", "mine", {"torch": "2.14"})
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "report.json").write_text("{")
    now = {"torch": "2.13", "threads": 1, "libraries": {"x": "2"}, "new": True, "cpu": ""}
    mine = [
        Case(id="mine-w4", strategy="mine", world=4),
        Case(id="mine-w4-own", strategy="mine", world=4, workload="own.py:W"),
    ]
    # The strategy was edited; the second workload is one that the green run has not seen.
    made = {
        case.id: Provenance(environment=now, digests={"strategy": "cc", "workload": digest})
        for case, digest in zip(mine, ("bb", "dd"), strict=True)
    }
    found = changes_since_last_pass(tmp_path, mine, made)
    assert found is not None
    assert found.run == "2"
    assert [(c.kind, c.name, c.then, c.now) for c in found.changes] == [
        ("code", "strategy mine", "aa", "cc"), ("machine", "cpu", "A B", "none"),
        ("software", "torch", "2.12", "2.13"), ("software", "libraries.x", "1", "2"),
        ("other", "new", "none", "true"),
    ]  # fmt: skip
    assert str(found.changes[0]) == "the code of strategy mine has changed"
    assert str(found.changes[1]) == "cpu was 'A B' and is none"
    bits = changes_affecting_bits(Provenance(environment=green), made["mine-w4"], mine[0])
    assert [c.name for c in bits] == ["cpu", "torch", "libraries.x"]

    (tmp_path / "2" / "cases" / "broken.json").write_text("{")
    assert changes_since_last_pass(tmp_path, mine, made) == found
    none = [Case(id="mine-w4", strategy="none", world=4)]
    assert changes_since_last_pass(tmp_path, none, made) is None
    assert changes_since_last_pass(tmp_path / "nowhere", mine, made) is None
