"""The library's front door: correct strategies pass, everything planned is compared."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distcheck
from distcheck.errors import CannotRunError, ExitCode, UsageError, VerdictError
from distcheck.records import Report
from distcheck.verification import session
from distcheck.worlds.pool import Pool

SMALL = "tests.mutants.small:Small"
STRATEGIES = ("gather_scatter", "allreduce", "ddp")


def assert_everything_compared(report: Report) -> None:
    for case in report.cases:
        for result in case.checks:
            assert result.verdict == "pass", (case.case.id, result)
            if result.check not in ("outcome",):
                assert result.compared.elements > 0, (case.case.id, result)
            assert result.compared.ranks == case.case.world


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_correct_strategies_pass(world: int) -> None:
    """Each world by itself is what many another test runs: `test_any_size_passes` for one."""
    report = distcheck.verify(STRATEGIES, world=world, workload=["exact", "mlp"], steps=3)
    assert_everything_compared(report)
    layers = {r.layer for case in report.cases for r in case.checks if r.check == "gradients"}
    assert layers == {"exact", "bitwise", "rounding", "full batch float32", "full batch float64"}


@pytest.mark.sweep
def test_the_default_run() -> None:
    """Its cases are planned in test_plan.py, and the command's run is compared with the README in
    test_cli.py.
    """
    report = distcheck.verify("allreduce")
    assert [c.case.id for c in report.cases] == [
        "allreduce-w4-exact-float32", "allreduce-w4-cnn-float32",
        "allreduce-w4-composite-float32", "allreduce-w4-composite-float64",
    ]  # fmt: skip
    assert_everything_compared(report)
    assert report.raise_for_verdict() is report


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batchnorm_is_judged_against_the_ghost_batch(strategy: str) -> None:
    report = distcheck.verify(strategy, world=3, workload="tests.mutants.workloads:Normalized")
    assert_everything_compared(report)
    (case,) = report.cases
    (semantic,) = [
        r for r in case.checks if (r.check, r.layer) == ("gradients", "full batch float32")
    ]
    assert "BatchNorm: the reference uses ghost batches" in semantic.reason
    assert "(86, 85, 85)" in semantic.reason
    assert ("buffers", "bitwise") in {(r.check, r.layer) for r in case.checks}


@pytest.mark.parametrize(
    "dtype",
    ["float64", *(pytest.param(d, marks=pytest.mark.sweep) for d in ("bfloat16", "float16"))],
)
def test_other_dtypes(dtype: str) -> None:
    report = distcheck.verify(STRATEGIES, world=3, workload=SMALL, dtype=dtype)
    assert_everything_compared(report)
    assert {c.case.dtype for c in report.cases} == {dtype}


def test_world_1_says_what_it_cannot_show() -> None:
    report = distcheck.verify("allreduce", world=1, workload="exact")
    (case,) = report.cases
    assert [(c.check, c.verdict) for c in case.checks if c.verdict != "pass"] == [
        ("sensitivity", "unknown")
    ]
    assert (report.verdict, report.exit_code) == ("unknown", ExitCode.UNKNOWN)
    assert "world size 1 has nothing to synchronize" in case.notes[0]


@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    world=st.integers(2, 5), batch=st.integers(5, 300), steps=st.integers(1, 5),
    seed=st.integers(0, 10**6), strategy=st.sampled_from(STRATEGIES),
)  # fmt: skip
def test_any_size_passes(world: int, batch: int, steps: int, seed: int, strategy: str) -> None:
    report = distcheck.verify(
        strategy, world=world, batch=batch, steps=steps, seed=seed, workload=["exact", SMALL]
    )
    assert_everything_compared(report)


def correct(model, step):  # type: ignore[no-untyped-def]
    """A stranger's sync: no contract, any name."""
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


def test_a_function_is_found_by_its_name() -> None:
    report = distcheck.verify(correct, world=2, workload=SMALL, dtype="float32")
    assert report.cases[0].case.strategy == "tests.world.test_verify:correct"
    assert report.verdict == "pass"
    assert ("gradients", "bitwise") not in {(r.check, r.layer) for r in report.cases[0].checks}
    ledger = report.cases[0].ledger  # distcheck's own communication is not in it
    assert ledger is not None
    assert {row.place.partition(":")[0] for row in ledger.rows} == {"tests/world/test_verify.py"}
    assert ledger.reduced == ledger.gradient_bytes > 0


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="no importable name"):
        distcheck.verify(lambda model: None)


def test_a_failure_is_an_assertion_with_the_report_in_it() -> None:
    report = distcheck.verify(
        "tests.mutants.scale:missing_division", workload=SMALL, dtype="float32"
    )
    with pytest.raises(VerdictError, match="FAIL") as caught:
        report.raise_for_verdict()
    text = str(caught.value)
    assert "first" in text
    assert "0.weight[0,0]" in text


def test_an_update_is_judged_by_its_own_rank_alone() -> None:
    """Rank 1's gradient is wrong, ranks 2 and 3 share rank 0's: no update was."""
    report = distcheck.verify(
        "bench/planted.py:flipped_on_one_rank", workload=SMALL, dtype="float32", batch=64, steps=1,
        variables={"BIT": 22},
    )  # fmt: skip
    failed = {r.check for case in report.cases for r in case.checks if r.verdict == "fail"}
    assert failed == {"gradients", "agreement"}


def test_too_many_ranks_for_this_machine() -> None:
    with pytest.raises(CannotRunError, match=r"needs about .* (GiB of memory|open files)"):
        distcheck.verify("allreduce", world=4_000, batch=4_000, workload="cnn")


SETTINGS = """
import torch
import torch.distributed as dist

torch.set_num_threads(2)
torch.use_deterministic_algorithms(False)
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = True
{newer}

def average(model, step):
    assert torch.get_num_threads() == 1, torch.get_num_threads()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)
    assert {{kind.fp32_precision for kind in kinds}} == {{"ieee"}}
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= step.world_size
"""


@pytest.mark.parametrize(
    "newer", ["", "torch.backends.fp32_precision = 'tf32'",
              "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
              "torch.backends.disable_global_flags()"],
)  # fmt: skip
def test_global_settings_of_a_script_are_pinned(tmp_path: Path, newer: str) -> None:
    """Of the two interfaces to TF32 the older cannot be read where the newer was used."""
    file = tmp_path / "script.py"
    file.write_text(SETTINGS.format(newer=newer))
    report = distcheck.verify(f"{file}:average", world=2, workload=SMALL, dtype="float32")
    assert report.verdict == "pass", report.cases[0].outcomes
    assert report.environment["float32_matmul_precision"] == "highest"
    assert report.environment["threads"] == 1


def test_the_hosts_process_is_left_alone() -> None:
    """verify() neither changes torch's settings here nor leaves variables behind."""
    import os

    import torch

    before = (torch.get_num_threads(), torch.initial_seed(), dict(os.environ))
    distcheck.verify("allreduce", world=2, workload="exact")
    assert (torch.get_num_threads(), torch.initial_seed(), dict(os.environ)) == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_no_false_alarm(world: int, seed: int) -> None:
    report = distcheck.verify(STRATEGIES, world=world, seed=seed)
    assert_everything_compared(report)


@pytest.mark.sweep
@pytest.mark.vgg
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_no_false_alarm_on_vgg11(world: int, seed: int) -> None:
    report = distcheck.verify(STRATEGIES, world=world, seed=seed, workload="vgg11")
    assert_everything_compared(report)


@pytest.mark.parametrize(
    ("per_judge_s", "expected"), [(1e9, [(0, 1, 2)]), (1e-9, [(0,), (1,), (2,)])]
)
def test_a_verdict_is_that_of_one_judge_or_many(
    monkeypatch: pytest.MonkeyPatch, per_judge_s: float, expected: list[tuple[int, ...]]
) -> None:
    judged = []

    def started(pool: Pool, judging: Any, *data: Any) -> Any:
        judged.append(judging.request.steps)
        return start(pool, judging, *data)

    start = session.start_judging  # type: ignore[attr-defined]
    monkeypatch.setattr(session, "start_judging", started)
    monkeypatch.setattr(session, "_JUDGE_PER_RANK_S", per_judge_s)
    monkeypatch.setattr(session, "_LONG_WORLD_S", 1e9)  # however crowded it is
    report = distcheck.verify(
        "allreduce", world=2, workload="tests.mutants.workloads:FreezesLater", dtype="float32"
    )
    assert_everything_compared(report)
    assert [steps for steps in judged if steps] == expected
