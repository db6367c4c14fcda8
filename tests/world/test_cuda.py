"""On a GPU: gloo and NCCL, with several ranks on one GPU, too; CPU against GPU; and refusals."""

import json
from pathlib import Path

import pytest

from distcheck import backends
from distcheck.machine import devices
from tests.plugin.running import run_warm
from tests.world.command import QUICK, Run, distcheck
from tests.world.warm import distcheck as warm

__all__ = ["distcheck", "warm"]

on_gpu = pytest.mark.skipif(devices.gpu_count() == 0, reason="this machine has no NVIDIA GPU")
no_gpu = pytest.mark.skipif(devices.gpu_count() > 0, reason="this machine has a GPU")
CUDA = ("--device", "cuda", "--json", "r.json")


@on_gpu
@pytest.mark.parametrize("strategy", ["gather_scatter", "allreduce", "ddp"])
@pytest.mark.parametrize(
    ("backend", "world"), [("gloo", "4"), ("nccl", "1"), ("nccl", "2"), ("nccl", "4")]
)
def test_strategies(
    distcheck: Run, tmp_path: Path, strategy: str, backend: str, world: str
) -> None:
    if why := backends.missing_for(backend, int(world)):
        pytest.skip(why)
    words = ("--strategy", strategy, "--backend", backend, "--world", world, *CUDA)
    ran = distcheck("verify", *words)
    alone = world == "1"  # which exchanges nothing, and everything else passes
    assert ran.returncode == (5 if alone else 0), ran.stdout + ran.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    lacking = {c["check"] for case in report["cases"] for c in case["checks"]
               if c["verdict"] != "pass"}  # fmt: skip
    assert lacking == ({"sensitivity"} if alone else set())
    assert report["environment"]["gpu"]
    assert report["environment"]["tf32"] is False
    assert [case["case"]["device"] for case in report["cases"]] == ["cuda"] * 5
    assert report["cases"][-1]["case"]["id"].endswith("against-cpu")


@on_gpu
def test_a_wrong_gradient_is_seen_and_named_there(distcheck: Run, tmp_path: Path) -> None:
    """Also in the case that is compared with the CPU, whose bits are others."""
    ran = distcheck("verify", "--strategy", "bad.py:no_sync", *QUICK, *CUDA)
    assert ran.returncode == 1, ran.stdout
    cases = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert [[d["cause"] for d in case["diagnosis"]] for case in cases] == [["missing-sync"]] * 2


@on_gpu
@pytest.mark.world(4, device="cuda")
def test_the_marker(world) -> None:  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist

    total = torch.full((3,), float(world.rank), device=world.device)
    dist.all_reduce(total)
    assert total.device.type == "cuda"
    assert total.tolist() == [6.0] * 3


@on_gpu
@pytest.mark.world(2, device="cuda", backend="nccl")
def test_the_marker_over_nccl(world) -> None:  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist

    total = torch.full((3,), float(world.rank), device=world.device)
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3


@no_gpu
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "cuda"), "device 'cuda' is not available: this machine has no NVIDIA GPU"),
        (("--backend", "nccl"), "backend nccl needs an NVIDIA GPU; this machine has none"),
        (("--backend", "nccl", "--device", "cuda"), "this machine has none"),
    ],
)
def test_without_one(warm: Run, words: tuple[str, ...], said: str) -> None:
    ran = warm("verify", "--strategy", "allreduce", *words)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert said in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


def test_a_strategy_for_gpus_is_refused_without(warm: Run) -> None:
    ran = warm("verify", "--strategy", "data_parallel", *QUICK)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert "strategy data_parallel works only on device cuda, not on cpu" in ran.stderr


@on_gpu
def test_data_parallel(distcheck: Run) -> None:
    words = ("--strategy", "data_parallel", "--world", "1", "--workload", "mlp", *CUDA)
    ran = distcheck("verify", *words)
    assert ran.returncode == (0 if devices.gpu_count() > 1 else 5), ran.stdout + ran.stderr


OLD_NCCL = """
from distcheck.machine import devices
devices.gpu_count = lambda environ=None: 1
devices.nccl_version = lambda: (2, 28, 9)
"""


@pytest.mark.parametrize(
    ("marker", "conftest", "said"),
    [
        pytest.param("2, device='cuda'", "", "this machine has no NVIDIA GPU", marks=no_gpu),
        ("2, device='cuda', backend='nccl'", OLD_NCCL, "NCCL 2.28.9 requires a separate GPU"),
    ],
    ids=["no GPU", "an old NCCL"],
)
def test_the_marker_skips(tmp_path: Path, marker: str, conftest: str, said: str) -> None:
    (tmp_path / "conftest.py").write_text(conftest)
    test = f"@pytest.mark.world({marker})\ndef test_there(world): raise AssertionError\n"
    ran = run_warm(tmp_path, f"import pytest\n{test}", "-rs", columns=400)
    assert "1 skipped" in ran.stdout, ran.stdout
    assert said in ran.stdout
