"""Right code that fails a default case for a known reason passes, says what was not looked at, and
its wrong twin still fails.
"""

import functools
from pathlib import Path

import msgspec
import pytest

import distcheck
from distcheck.records import Report

pytestmark = pytest.mark.usefixtures("no_rerun")

CODE = Path(__file__).parents[1] / "adapted" / "float32_only.py"
DEFAULT = ("exact", "mlp:small")  # as the default run: float32, and float64 beside it


RIGHT = ("bucket", "through_numpy", "gathers_floats", "slices")
WRONG = (
    "bucket_of_sums", "through_numpy_all_but_one", "gathers_floats_and_sums", "slices_and_sums",
    "a_billionth_too_large",
)  # fmt: skip


def verify(*names: str, world: int = 2, batch: int = 48, deadline_s: float = 30.0) -> Report:
    return distcheck.verify(
        [f"{CODE}:{name}" for name in names], world=world, workload=DEFAULT, batch=batch, steps=1,
        deadline_s=deadline_s,
    )  # fmt: skip


@functools.cache
def in_one_run() -> Report:
    """All that is run in the same way, looked at once."""
    return verify(*RIGHT, *WRONG)


def of(name: str) -> Report:
    whole = in_one_run()
    place = f"{CODE}:{name}"
    cases = tuple(case for case in whole.cases if case.case.strategy == place)
    out = {n: why for n, why in whole.left_out.items() if n.startswith(f"float32_only-{name}-w2")}
    return msgspec.structs.replace(whole, cases=cases, left_out=out)


@pytest.mark.parametrize(
    ("name", "cases", "said"),
    [
        ("bucket", ["exact float32", "mlp:small float32", "mlp:small float64"], ""),
        ("through_numpy", ["exact float32", "mlp:small float32"],
         "all of its gradients are representable in float32"),
        ("gathers_floats", ["exact float32", "mlp:small float32"],
         "pass --dtype float64 to judge it"),
        ("slices", ["exact:no-scalar float32", "mlp:small float32", "mlp:small float64"],
         "scalar (0-d) parameters are not judged"),
    ],
)  # fmt: skip
def test_right_code_of_one_dtype_or_shape_passes(name: str, cases: list[str], said: str) -> None:
    report = of(name).raise_for_verdict()
    assert [f"{c.case.workload} {c.case.dtype}" for c in report.cases] == cases
    notes = "; ".join(note for case in report.cases for note in case.notes)
    assert said in notes
    assert bool(notes) == bool(said) or "cannot distinguish reduction orders" in notes
    assert len(report.left_out) == 3 - len(cases)


@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("bucket_of_sums", {"missing-division"}),
        ("through_numpy_all_but_one", {"partial-sync"}),
        ("gathers_floats_and_sums", {"missing-division"}),
        ("slices_and_sums", {"missing-division"}),
        ("a_billionth_too_large", {"wrong-divisor"}),
    ],
)
def test_its_wrong_twin_fails(name: str, causes: set[str]) -> None:
    report = of(name)
    assert report.verdict == "fail"
    named = {cause.cause for case in report.cases for cause in case.diagnosis}
    assert causes <= named
    assert "crash" not in named, "of which the cause is not what is wrong"


def test_float64_that_was_asked_for_is_judged() -> None:
    place = f"{CODE}:through_numpy"
    report = distcheck.verify(
        place, world=2, workload="mlp:small", dtype="float64", batch=48, steps=1
    )
    assert report.verdict == "fail"
    assert {cause.cause for cause in report.cases[0].diagnosis} == {"low-precision"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("averages",
         "correct if all ranks have equally many samples (mlp:small float32 passes with --batch"),
        ("sums", "mlp:small float32 does not pass there either (missing-division)"),
    ],
)  # fmt: skip
def test_unequal_shards_fail_and_say_what_equal_ones_do(name: str, said: str) -> None:
    report = verify(name, world=3, batch=49)
    assert report.verdict == "fail"
    (mlp,) = [
        c for c in report.cases if (c.case.workload, c.case.dtype) == ("mlp:small", "float32")
    ]
    (unweighted,) = [cause for cause in mlp.diagnosis if cause.cause == "unweighted-mean"]
    assert said in f"{unweighted.evidence} {unweighted.suggestion}"


def test_whole_numbers_that_are_short_by_chance_are_no_low_precision() -> None:
    """Shards of 86, 85 and 85 samples are off by as little as bfloat16 is."""
    place = f"{CODE}:averages"
    report = distcheck.verify(place, world=3, workload="exact", batch=256, steps=1)
    assert [cause.cause for cause in report.cases[0].diagnosis] == ["unweighted-mean"]


def test_a_hang_ends_the_other_cases_of_its_world() -> None:
    report = verify("waits_for_a_rank_that_has_left", deadline_s=2.0)
    assert [case.verdict for case in report.cases] == ["fail", "unknown", "unknown"]
    for case in report.cases[1:]:
        assert case.outcomes == ()
        assert {check.verdict for check in case.checks} == {"unknown"}
        for check in case.checks:
            assert check.reason.startswith(
                "not run: the strategy hung in exact float32; --after-hang runs every case"
            )


RACE = """
import time
import torch
import torch.distributed as dist

def hook(state, bucket):
    time.sleep(0.1 * dist.get_rank())  # so that rank 0 reads before rank 1 has sent
    dist.all_reduce(bucket.buffer(), async_op=True)
    done = torch.futures.Future()
    done.set_result(bucket.buffer() / dist.get_world_size())
    return done
"""


def test_a_hook_that_does_not_wait_is_named_with_its_line(tmp_path: Path) -> None:
    """Its gradients look like several other mistakes, as it happens."""
    (tmp_path / "race.py").write_text(RACE)
    report = distcheck.verify(f"{tmp_path}/race.py:hook", world=2, workload="mlp:small", steps=1)
    (cause,) = report.cases[0].diagnosis
    assert cause.cause == "tensor-used-in-flight"
    assert "race.py:10" in cause.evidence
    assert "race.py:8" in cause.evidence
