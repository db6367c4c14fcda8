"""What checks sum up for pictures: a picture must not mislead where a verdict does not."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcheck.judge.checks.comparison import (
    bits_of,
    bitwise,
    by_norm,
    ulp_bins,
    ulp_distance,
    within,
)
from distcheck.judge.checks.tally import Sums
from distcheck.plan.provenance import Provenance, changes_for_bits
from distcheck.records import Case, CaseReport, CheckResult
from distcheck.records.picture_sums import MOST_ELEMENTS, NONFINITE, merge_aggregates
from distcheck.reports.json_report import as_entries
from distcheck.store.earlier_runs import since_last_green
from distcheck.store.run_folder import Store
from tests import documents

DTYPES = {32: torch.float32, 64: torch.float64, 16: torch.float16}


def expected_bin(distance: int) -> int:
    return int(math.copysign(abs(distance).bit_length(), distance)) if distance else 0


@pytest.mark.parametrize("width", DTYPES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_bins_agree_with_the_distance_of_single_numbers(width: int, data: st.DataObject) -> None:
    """`ulp_distance` goes by struct, one number at a time, and shares nothing with it."""
    numbers = st.floats(width=width, allow_nan=False, allow_infinity=False)  # type: ignore[arg-type]
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8))
    dtype = DTYPES[width]
    actual, expected = (torch.tensor(side, dtype=dtype) for side in zip(*pairs, strict=True))
    wanted: dict[int, int] = {}
    for one, two in pairs:
        distance = ulp_distance(one, two, dtype)
        assert distance is not None
        place = expected_bin(distance)
        wanted[place] = wanted.get(place, 0) + 1
    found = ulp_bins(actual, expected)
    if width == 64:  # differences beyond 2^53 are rounded, and may reach the next power of two
        assert sum(found.values()) == len(pairs)
        found, wanted = ({b: n for b, n in s.items() if abs(b) < 53} for s in (found, wanted))
    assert found == wanted


def test_neighbors_signs_zeros_and_what_is_not_finite() -> None:
    one = torch.tensor([1.0, 1.0, 1.0, 0.0, float("inf"), float("nan"), float("inf")])
    up = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    down = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    two = torch.stack([up, down, one[2], torch.tensor(-0.0), one[0], one[0], one[4]])
    assert ulp_bins(one, two) == {-1: 1, 1: 1, 0: 3, NONFINITE: 2}
    assert ulp_bins(torch.arange(3), torch.arange(3)) == {}


def test_a_large_tensor_is_sampled_and_counted_as_a_whole() -> None:
    actual = torch.ones(100_000)
    found = ulp_bins(actual, actual * (1 + 2**-23))
    assert set(found) == {-1}
    assert found[-1] == pytest.approx(100_000, abs=1)


def test_expected_in_float64_is_rounded_to_the_dtype() -> None:
    actual = torch.tensor([0.1])
    assert ulp_bins(actual, torch.tensor([0.1], dtype=torch.float64)) == {0: 1}
    assert bits_of(0.1, torch.float32) == "3dcccccd"
    assert bits_of(0.1, torch.bfloat16) == "3dcd"
    assert bits_of(-0.0, torch.float64) == "8000000000000000"
    assert bits_of(1e300, torch.float32) == ""


def test_of_what_differs_the_worst_elements_are_kept_with_their_ranks() -> None:
    expected = torch.zeros(100)
    actual = expected.clone()
    actual[:20] = torch.arange(1.0, 21.0)
    sums = Sums()
    comparison = bitwise(actual, expected)
    for rank in (0, 2):
        sums.add(comparison, parameter="w", rank=rank, step=1)
    found = sums.result()
    assert [e.actual for e in found.elements] == [20.0, 19.0, 18.0, 17.0]
    assert {e.ranks for e in found.elements} == {(0, 2)}
    assert found.elements[0].actual_bits == "41a00000"
    assert found.shares == {"w": {1: "inf"}}
    assert found.in_bits


def test_bits_that_differ_where_numbers_do_not_are_no_equality() -> None:
    for dtype in (torch.float32, torch.complex64):
        zero = torch.zeros(2, dtype=dtype)
        sums = Sums()
        sums.add(bitwise(-zero, zero), parameter="w", rank=0, step=0)
        assert sums.result().shares == {"w": {0: "inf"}}


def test_shares_are_the_worst_of_all_ranks() -> None:
    sums = Sums()
    bound = torch.full((3,), 0.5, dtype=torch.float64)
    for rank, off in enumerate((0.1, 0.4, 0.2)):
        actual = torch.full((3,), 1.0 + off)
        comparison = within(actual, torch.ones(3, dtype=torch.float64), bound)
        sums.add(comparison, parameter="w", rank=rank, step=0)
    norm = by_norm(torch.tensor([3.0, 4.0]), torch.zeros(2), 2.5)
    sums.add(norm, parameter="v", rank=0, step=0)
    found = sums.result()
    assert found.shares["w"][0] == pytest.approx(0.8, rel=1e-6)
    assert found.shares["v"][0] == 2.0
    assert not found.in_bits
    assert [e.index for e in found.elements] == [()]


def test_ever_more_failures_keep_only_the_worst() -> None:
    sums = Sums()
    for step in range(300):
        comparison = bitwise(torch.tensor([step + 1.0]), torch.tensor([0.0]))
        sums.add(comparison, parameter="w", rank=0, step=step)
    steps = [element.step for element in sums.result().elements]
    assert steps == list(range(299, 299 - MOST_ELEMENTS, -1))


def test_parts_of_several_judges_are_put_together() -> None:
    parts = []
    for step in (1, 0):
        sums = Sums()
        sums.add(bitwise(torch.ones(2), torch.ones(2)), parameter="w", rank=0, step=step)
        sums.add_losses(step, [1.0, 3.0], mean=2.0, expected=2.0, bound=0.0)
        sums.add_digests(step, "gradient", ["aa", "bb", "aa", ""])
        parts.append(sums.result())
    result = CheckResult(
        check="gradients", layer="bitwise", verdict="pass", aggregates=merge_aggregates(parts)
    )
    keys = as_entries(result)
    assert keys["map"].rows == ["=="]
    assert keys["map"].steps == [0, 1]
    assert (keys["ulp"].bins, keys["ulp"].nonfinite) == ({"0": 4}, 0)
    assert keys["loss"].ranks == [[1.0, 1.0], [3.0, 3.0]]
    assert keys["digests"].kinds == {"gradient": ["0,2=aa 1=bb 3=-"] * 2}


def test_what_was_not_compared_is_no_equality() -> None:
    sums = Sums()
    same = bitwise(torch.ones(1), torch.ones(1))
    sums.add(same, parameter="a", rank=0, step=0)
    sums.add(same, parameter="b", rank=0, step=1)
    sums.fail(parameter="b", step=1)
    keys = as_entries(
        CheckResult(check="gradients", layer="bitwise", verdict="fail", aggregates=sums.result())
    )
    assert keys["map"].rows == ["=.", ".x"]


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
    document = {
        "verdict": verdict, "environment": environment, "cases": [{"strategy": strategy}]
    }  # fmt: skip
    (runs / name / "report.json").write_text(json.dumps(document))
    case = Case(id="saved", strategy=strategy, world=2)
    made = Provenance(environment=environment, digests=digests or {})
    Store(runs / name, keep_everything=False).write_case(case, made)


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
    found = since_last_green(tmp_path, mine, made)
    assert found is not None
    assert found.run == "2"
    assert [(c.kind, c.name, c.then, c.now) for c in found.changes] == [
        ("code", "strategy mine", "aa", "cc"), ("machine", "cpu", "A B", "none"),
        ("software", "torch", "2.12", "2.13"), ("software", "libraries.x", "1", "2"),
        ("other", "new", "none", "true"),
    ]  # fmt: skip
    assert str(found.changes[0]) == "the code of strategy mine has changed"
    assert str(found.changes[1]) == "cpu was 'A B' and is none"
    bits = changes_for_bits(Provenance(environment=green), made["mine-w4"], mine[0])
    assert [c.name for c in bits] == ["cpu", "torch", "libraries.x"]

    (tmp_path / "2" / "cases" / "broken.json").write_text("{")
    assert since_last_green(tmp_path, mine, made) == found
    none = [Case(id="mine-w4", strategy="none", world=4)]
    assert since_last_green(tmp_path, none, made) is None
    assert since_last_green(tmp_path / "nowhere", mine, made) is None
