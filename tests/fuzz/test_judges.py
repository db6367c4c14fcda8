"""Comparisons of extreme numbers: each result fits its field, whatever judged code computed."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import distcheck
from distcheck.errors import AnswerError
from distcheck.judge.checks import comparison
from distcheck.judge.checks.tally import Tally
from distcheck.judge.jobs import JUDGE, OBSERVE
from distcheck.machine.numerics import real_parts
from distcheck.records import CheckResult
from distcheck.records.decoding import MOST
from distcheck.verification import session

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
NUMBERS = (
    0.0, 1.0, 2.0, 3.0, 5e-324, 2.2e-308, 1e-45, 1.2e-38, 6e-8, 6.1e-5, 448.0, 65504.0, 2.0**53,
    2.0**63, 3.4028234663852886e38, 1e300, 1.7976931348623157e308, math.inf, math.nan,
)  # fmt: skip
SIGNED = torch.tensor([sign * one for one in NUMBERS for sign in (1, -1)], dtype=torch.float64)
ELEMENTS = 24


def drawn(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    def numbers() -> torch.Tensor:
        return SIGNED[torch.randint(len(SIGNED), (ELEMENTS,), generator=generator)]

    if dtype.is_complex:
        return torch.complex(numbers(), numbers()).to(dtype)
    if not dtype.is_floating_point:
        return numbers().nan_to_num(0, 2.0**62, -(2.0**62)).clamp(-(2.0**62), 2.0**62).to(dtype)
    return numbers().to(dtype)


def compared(dtype: torch.dtype, generator: torch.Generator) -> list[comparison.Comparison]:
    actual, other = drawn(dtype, generator), drawn(dtype, generator)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected, bound = drawn(wide, generator), drawn(torch.float64, generator)
    parts = real_parts(expected)
    bounds = bound.unsqueeze(-1).expand_as(parts) if dtype.is_complex else bound
    found = [comparison.compare_bitwise(actual, other), comparison.compare_bitwise(actual, actual)]
    for nan in (False, True):
        found.append(comparison.compare_within(actual, parts, bounds, nan_is_expected=nan))
        found.append(comparison.compare_by_norm(actual, expected, 1e-3, nan_is_expected=nan))
    if dtype != torch.float8_e4m3fn:  # for which torch has no addition
        found.append(comparison.compare_numbers(actual, other))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_result_can_be_sent_and_read(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(20260131)
    tally = Tally("gradients", "bitwise")
    for _ in range(40):
        for one in compared(dtype, generator):
            tally.add(one, parameter="p", rank=0, step=0)
            for place in filter(None, (one.worst, one.first)):
                assert place.ulp is None or 0 <= place.ulp <= MOST
    result = tally.result()
    assert result.verdict == "fail"
    assert JUDGE.decode(msgspec.msgpack.encode([result])) == [result]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_equal_to_itself_passes(dtype: torch.dtype) -> None:
    """Clamped distances and wider types hide no difference, and make none."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        one = drawn(dtype, generator)
        assert comparison.compare_bitwise(one, one.clone()).ok
        changed = one.clone()
        if dtype != torch.bool:
            changed[3] = 1 if one[3] != 1 else 2
            assert not comparison.compare_bitwise(changed, one).ok


def test_a_distance_beyond_63_bits_is_the_most_that_there_is() -> None:
    """Float64 has 2**62 numbers from 0 to 2, and from -2 to 2 one more than fits."""
    for one in (2.0, 1e300, 1.7976931348623157e308):
        assert comparison.ulp_distance(-one, one, torch.float64) == -MOST
        assert comparison.ulp_distance(one, -one, torch.float64) == MOST
    assert comparison.ulp_distance(1.0, -1.0, torch.float64) == 2 * 0x3FF0000000000000
    assert comparison.ulp_distance(-2.0, 2.0, torch.float32) == -2 * 0x40000000
    assert comparison.ulp_distance(1.0, 1e300, torch.bfloat16) is None


@pytest.mark.parametrize("answer", [b"", b"\xc1", b"\x93", b"x" * 10])
def test_an_answer_that_cannot_be_read_makes_only_its_case_unknown(answer: bytes) -> None:
    child = SimpleNamespace(done=SimpleNamespace(payload=answer))
    world: Any = SimpleNamespace(children=[child], succeeded=True, results=[answer])
    planned = [
        SimpleNamespace(check=check, layer=layer)
        for check, layer in (("gradients", "bitwise"), ("loss", "rounding"), ("purpose", "-"))
    ]
    judging: Any = SimpleNamespace(planned=planned[:2], of_run=planned[2:])
    results = session.judged_results(world, judging)
    assert [(r.check, r.layer, r.verdict) for r in results] == [
        ("gradients", "bitwise", "unknown"), ("loss", "rounding", "unknown"),
        ("purpose", "-", "unknown"),
    ]  # fmt: skip
    assert "the check itself raised an error: the answer of" in results[0].reason
    run: Any = SimpleNamespace(case=SimpleNamespace(world=2))
    assert "cannot be read" in session.observed_measurements(world, run).trouble
    for job in (JUDGE, OBSERVE):
        with pytest.raises(AnswerError):
            job.decode(answer)


def test_a_number_that_no_field_holds_is_no_answer() -> None:
    huge = CheckResult(check="x", layer="-", verdict="fail")
    result = msgspec.structs.replace(huge, compared=2**70)
    with pytest.raises(AnswerError, match="cannot be sent"):
        JUDGE.encode.__globals__["_encoded"]([result])


EXTREME = """
import torch, torch.distributed as dist

def sync(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        most = torch.finfo(p.grad.dtype).max
        p.grad.copy_({formula})
"""


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "formula",
    ["torch.where(p.grad > 0, -3.0, 3.0)", "-most * torch.sign(p.grad)", "p.grad * float('nan')",
     "p.grad / 0", "torch.full_like(p.grad, -5e-324)"],
)  # fmt: skip
def test_a_run_with_extreme_gradients_fails_as_one(
    dtype: str, formula: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("extreme.py").write_text(EXTREME.format(formula=formula))
    report = distcheck.verify(
        "extreme.py:sync", world=2, workload="mlp:small", dtype=dtype, separate=False
    )
    assert report.verdict == "fail"
    assert not [check for case in report.cases for check in case.checks if check.defect]
