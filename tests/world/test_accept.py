"""Real designs that lose something on purpose: they fail, and with `--accept` they pass."""

import functools
import json
from pathlib import Path

import pytest

import distcheck
from distcheck.errors import UsageError
from distcheck.records import CaseReport
from distcheck.reports.json_report import as_document
from tests.world import lossy, warm
from tests.world.test_verify import assert_everything_compared

pytestmark = pytest.mark.usefixtures("no_rerun")

HERE = "tests.world.lossy:"
ACCEPTED = {
    lossy.FP16: ("low-precision:fp16", {"low-precision"}),
    lossy.BF16: ("low-precision:bf16", {"low-precision"}),
    f"{HERE}per_tensor": ("quantized:8", {"noise"}),
    f"{HERE}PowerSGD": ("low-rank:2", {"unexplained"}),
    f"{HERE}PostLocalSGD": ("local-sgd:2", {"model-averaging"}),
}
MORE = {
    f"{HERE}symmetric_4": ("quantized:4", {"unexplained"}),
    f"{HERE}one_grid": ("quantized:8", {"noise"}),
    f"{HERE}PowerSGDWithoutFeedback": ("low-rank:5:no-feedback", {"unexplained"}),
    f"{HERE}averages_by_hand": ("local-sgd:3", {"model-averaging"}),
}


def verify(
    specs: list[str], steps: int, accept: str | None = None, workload: str = "Small"
) -> distcheck.Report:
    return distcheck.verify(
        specs, world=2, workload=f"{HERE}{workload}", dtype="float32", batch=64, steps=steps,
        accept=accept,
    )  # fmt: skip


@functools.cache
def without_a_word(specs: tuple[str, ...]) -> dict[str, CaseReport]:
    """All of them in one run: it is looked at once."""
    return dict(zip(specs, verify(list(specs), 3).cases, strict=True))


@pytest.mark.parametrize("spec", ACCEPTED, ids=lambda spec: spec.rpartition(":")[2])
def test_fails_without_a_word_and_passes_with_it(spec: str) -> None:
    accepts_as_said(spec, ACCEPTED)


@pytest.mark.sweep
@pytest.mark.parametrize("spec", MORE, ids=lambda spec: spec.rpartition(":")[2])
def test_so_do_more_of_them(spec: str) -> None:
    accepts_as_said(spec, MORE)


def accepts_as_said(spec: str, among: dict[str, tuple[str, set[str]]]) -> None:
    accept, causes = among[spec]
    case = without_a_word(tuple(among))[spec]
    assert case.verdict == "fail"
    assert {found.cause for found in case.diagnosis} == causes
    report = verify([spec], 6 if accept == "local-sgd:3" else 4, accept)
    assert_everything_compared(report)
    (case,) = report.cases
    assert case.accepted is not None
    assert case.accepted.kind == accept
    assert case.accepted.not_owed
    (document,) = as_document(report)["cases"]
    assert document["case"]["accept"] == accept
    assert list(document["accepted"]["not_owed"]) == list(case.accepted.not_owed)
    said = {r.reason for r in case.checks if r.check == "gradients" and r.layer == "rounding"}
    assert any("tensors were compressed" in reason for reason in said) == ("low-rank" in accept)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("AveragesAfter", "pass"), ("AveragesAfterOddSteps", "pass"), ("AveragesTooLate", "fail")],
)
def test_ranks_that_agree_because_nothing_moved_have_not_averaged(name: str, verdict: str) -> None:
    report = verify([f"{HERE}{name}"], 6, "local-sgd:2", "Warming")
    assert report.verdict == verdict, report.cases[0].checks


@pytest.mark.parametrize(
    ("name", "accept", "workload", "reason"),
    [
        ("SendsNothing", "gossip", "Small", "some ranks never mix with the others"),
        ("MixesFirst", "gossip:combine-first", "Decaying", "weight decay depends on the combined"),
    ],
)
def test_gossip_that_cannot_be_judged_is_unknown(
    name: str, accept: str, workload: str, reason: str
) -> None:
    report = verify([f"{HERE}{name}"], 2, accept, workload)
    assert report.verdict == "unknown"
    assert any(reason in check.reason for check in report.cases[0].checks)


def millions(model):  # type: ignore[no-untyped-def]
    """Infinities are averaged, and all else is a million."""
    import torch
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        overflowed = parameter.grad.isinf()
        parameter.grad = torch.where(overflowed, parameter.grad, torch.full_like(parameter, 1e6))


def test_beside_an_infinite_gradient_no_grid_bounds_anything() -> None:
    report = verify([f"{__name__}:millions"], 1, "quantized:8", "Overflowing")
    (case,) = report.cases
    found = {r.layer: r for r in case.checks if r.check == "gradients"}
    assert {layer: result.verdict for layer, result in found.items()} == {
        "rounding": "unknown", "full batch float32": "unknown",
    }  # fmt: skip
    assert found["rounding"].reason.startswith(
        "rank 0 at step 0: one of its gradients is not finite"
    )


def test_a_promise_is_owed_whatever_is_accepted() -> None:
    with pytest.raises(UsageError, match="ddp_bf16_hook promises an order, which is checked"):
        verify(["ddp_bf16_hook"], 1, "low-precision:bf16")
    with pytest.raises(UsageError, match="for replicated state, but fsdp shards it"):
        verify(["fsdp"], 4, "local-sgd:2")


def test_a_replay_accepts_the_same(tmp_path: Path) -> None:
    spec = ["--strategy", lossy.FP16, "--world", "2", "--workload", f"{HERE}Small", "--steps", "1"]
    words = [*spec, "--batch", "64", "--accept", "low-precision:float16"]
    save = ["--save", str(tmp_path / "kept"), "--dtype", "float32"]
    ran = warm.run("verify", *words, *save, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout
    screen = " ".join(ran.stdout.split())
    assert (
        "accepted low-precision:fp16 widens the rounding bound to 4 roundings to float16" in screen
    )
    assert "not checked: smaller errors" in screen
    (case,) = (tmp_path / "kept" / "cases").glob("*.json")
    assert json.loads(case.read_text())["accept"] == "low-precision:fp16"
    for again in (["replay", "--trust", str(case)], ["recheck", "--trust", str(tmp_path / "kept")]):
        report = tmp_path / "again.json"
        ran = warm.run(*again, "--json", str(report), cwd=tmp_path)
        assert ran.returncode == 0
        (found,) = json.loads(report.read_text())["cases"]
        assert found["case"]["accept"] == "low-precision:fp16"
        assert found["accepted"]["widened"].startswith("widens the rounding bound to 4 roundings")
