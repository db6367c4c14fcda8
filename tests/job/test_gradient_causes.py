"""Every cause of wrong gradients that can occur in a whole job, on recordings that are made up: as
a failure, and as a remark if one process does the same.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distcheck.job import causes, checks
from distcheck.job.script_changes import remarks
from distcheck.recordings.jobs.records import ClipCall
from tests.job import recordings
from tests.job.recordings import SHAPES, Facts, Tensors, gradients, make, mean, replaced

WORLD = 4


@pytest.fixture(autouse=True)
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of which two have one size, and enough elements to tell noise by."""
    monkeypatch.setattr(recordings, "SHAPES", SHAPES)
    for name, shape in {"weight": (9, 6), "bias": (9,), "scale": (9,)}.items():
        monkeypatch.setitem(SHAPES, name, shape)


def weighted(*weights: float) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        pairs = list(zip(weights, facts.locals, strict=True))
        facts.raw = {n: sum(w * g[n] for w, g in pairs) for n in SHAPES}  # type: ignore[misc]

    return change


def per_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Facts], None]:
    def changed(facts: Facts) -> None:
        facts.raw = {n: change(g) for n, g in facts.raw.items()}

    return changed


def mean_of(step: int, world: int) -> Tensors:
    return mean([gradients(rank, step) for rank in range(world)])


def stale(facts: Facts) -> None:
    facts.raw = mean_of(max(0, facts.step - 1), facts.world)


def accumulates(facts: Facts) -> None:
    held = [mean_of(step, facts.world) for step in range(facts.step + 1)]
    facts.raw = {n: sum(one[n] for one in held) for n in SHAPES}  # type: ignore[misc]


def swaps(facts: Facts) -> None:
    facts.raw |= {"bias": facts.raw["scale"], "scale": facts.raw["bias"]}


def shares_a_buffer(facts: Facts) -> None:
    facts.raw |= {"bias": facts.raw["scale"]}


def adds_noise(facts: Facts) -> None:
    drawn = torch.Generator().manual_seed(1000 + facts.step)
    noise = {n: 2e-3 * torch.randn(g.shape, generator=drawn) for n, g in facts.raw.items()}
    facts.raw = {n: g + noise[n] for n, g in facts.raw.items()}


def in_bfloat16(facts: Facts) -> None:
    rounded = [{n: g.bfloat16().float() for n, g in one.items()} for one in facts.locals]
    facts.raw = mean(rounded)


def three_times_over_three_passes(facts: Facts) -> None:
    facts.passes = [replaced(facts.a_pass(n), loss=2 / 3) for n in range(3)]
    facts.raw = {n: 3 * g for n, g in facts.raw.items()}


negated = per_tensor(torch.neg)
SAME_AS_ONE_PROCESS = (
    (stale, "stale-gradient"), (accumulates, "accumulated-gradient"),
    (swaps, "wrong-parameter-order"), (shares_a_buffer, "bucket-reused-in-flight"),
    (negated, "wrong-sign"), (adds_noise, "noise"), (in_bfloat16, "low-precision"),
    (per_tensor(lambda g: 0.7 * g), "gradients-modified-before-step"),
    (per_tensor(torch.sign), "gradients-modified-before-step"),
)  # fmt: skip
OF_RANKS = (
    (weighted(0, 1 / 3, 1 / 3, 1 / 3), "dropped-rank"),
    (weighted(0.5, 0.25, 0.25, 0), "duplicated-rank"),
    (weighted(0, 1, 0, 0), "single-rank-gradient"),
    (weighted(1 / 8, 1 / 8, 1 / 4, 1 / 2), "chained-mean"),
    (weighted(-0.25, 0.25, 0.25, 0.25), "wrong-sign"),
    (weighted(*[1 / 16] * 4), "double-division"),
    (three_times_over_three_passes, "accumulation-scale"),
)


@pytest.mark.parametrize("budget", [1 << 20, 0], ids=["whole", "sums"])
@pytest.mark.parametrize(("change", "cause"), [*SAME_AS_ONE_PROCESS[:5], *OF_RANKS])
def test_named(change: Callable[[Facts], None], cause: str, budget: int, tmp_path: Path) -> None:
    job = make(tmp_path, change, world=WORLD, steps=4, budget=budget)
    results = checks.checks_without_reference(job)
    assert {r.check for r in results if r.verdict == "fail"} >= {"gradients"}
    assert cause in [found.cause for found in causes.diagnose(job, results)]


@pytest.mark.parametrize(("change", "cause"), SAME_AS_ONE_PROCESS)
def test_single_process_remark(change: Callable[[Facts], None], cause: str, tmp_path: Path) -> None:
    job = make(tmp_path, change, world=WORLD, steps=4)
    (remark,), note = remarks(job, job.steps)
    assert remark.cause == cause or f"cannot tell this from {cause}" in remark.evidence
    assert "a single process does the same" in remark.evidence
    assert remark.suggestion
    assert not note


def clips_to_one(facts: Facts) -> None:
    norm = torch.stack([g.norm() for g in facts.raw.values()]).norm()
    facts.raw = {n: g / norm for n, g in facts.raw.items()}


def decays(facts: Facts) -> None:
    facts.raw = {n: g + 0.1 * facts.before[n] for n, g in facts.raw.items()}


def decays_weights_alone(facts: Facts) -> None:
    facts.raw |= {"weight": facts.raw["weight"] + 0.1 * facts.before["weight"]}


def ascends(facts: Facts) -> None:
    negated(facts)
    facts.passes = [replaced(one, losses=()) for one in facts.passes]


def takes_out_a_scale(facts: Facts) -> None:
    facts.passes = [replaced(one, loss=1024 * (one.loss or 0.0)) for one in facts.passes]
    facts.raw = {n: g / 1024 for n, g in facts.raw.items()}


def of_torch(facts: Facts) -> None:
    """After a right exchange, by torch's own clipping, which is recorded."""
    facts.at_step = {n: 0.5 * g for n, g in facts.raw.items()}
    facts.clips = (ClipCall(kind="norm", most=1.0, norm=2.0 - 1e-6),)


def centralized(g: torch.Tensor) -> torch.Tensor:
    return g - g.mean(dim=1, keepdim=True) if g.dim() > 1 else g


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        (clips_to_one, "clips gradients to a norm of 1"),
        (per_tensor(lambda g: g.clamp(-0.25, 0.25)), "clips each element of a gradient to 0.25"),
        (per_tensor(centralized), "centralizes gradients"),
        (decays, "adds 0.1 times each parameter to its gradient"),
        (decays_weights_alone, "adds 0.1 times each parameter to its gradient"),
        (ascends, "negates gradients, as for gradient ascent"),
        (takes_out_a_scale, "divides gradients by a loss scale of 1024"),
        (per_tensor(lambda g: WORLD * g), ""),
        (of_torch, ""),
        (lambda facts: None, ""),
    ],
)
def test_intended_is_a_note(change: Callable[[Facts], None], meant: str, tmp_path: Path) -> None:
    job = make(tmp_path, change, world=WORLD)
    found, note = remarks(job, job.steps)
    assert not found
    assert note == (f"the script {meant}, and so does a single process" if meant else "")
