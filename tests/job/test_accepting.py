"""Deviations that are meant: an accepted cause fails nothing, and what it promises is checked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from distcheck.errors import UsageError
from distcheck.job import accepting, causes, checks
from distcheck.job.guard_command import GuardOptions as OfGuard
from distcheck.job.options import JobOptions
from distcheck.recordings.jobs.records import CollectiveCall
from tests.job.recordings import LR, Facts, judged, make, reference, replaced

Change = Callable[[Facts], None]


def judge(
    folder: Path, kinds: Sequence[str], change: Change, lr: Callable[[int], float], steps: int = 3
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """The verdicts, and the causes that are left."""
    job = make(folder, change, steps=steps)
    alone = reference(job, folder, lr=lr)
    before = judged(job, alone)
    results = accepting.accept(kinds, job, alone, before, causes.diagnose(job, before, alone))
    left = causes.diagnose(job, results, alone)
    return {(r.check, r.layer): r.verdict for r in results}, [one.cause for one in left]


def right(facts: Facts) -> None:
    pass


def same_masks(facts: Facts) -> None:
    facts.passes = [replaced(facts.a_pass(0), draws=True, random={"torch": str(facts.step)})]


def test_same_random_numbers_may_be_meant(tmp_path: Path) -> None:
    verdicts, left = judge(tmp_path, [accepting.RANDOMNESS], same_masks, lambda step: LR)
    assert ("random streams", "-") not in verdicts
    assert (set(verdicts.values()), left) == ({"pass"}, [])


def same_noise(facts: Facts, *, differs: int = 1, **about: Any) -> None:
    """The same numbers for the four samples of each rank, different for each sample."""
    drawn = facts.step + differs * torch.arange(4.0)
    random = {"torch": f"{facts.step}"}
    facts.passes = [replaced(facts.passes[0], drew=True, random=random, **about)]
    facts.inputs = (torch.full((4,), 10.0 * facts.rank), drawn)


def with_a_broadcast(facts: Facts) -> None:
    same_noise(facts)
    facts.of_record = {"calls": (CollectiveCall("broadcast", "train.py:3", 4),)}


def of_its_own(facts: Facts) -> None:
    same_noise(facts)
    facts.inputs = (facts.inputs[0], facts.inputs[1] + 7 * facts.rank)


def a_shared_mask(facts: Facts) -> None:
    same_noise(facts)
    facts.inputs = (facts.inputs[0], facts.inputs[1][:3])


def of_the_same_samples(facts: Facts) -> None:
    same_noise(facts, rows=("a", "b", "c", "d"))


def of_a_loader(facts: Facts) -> None:
    same_noise(facts)
    facts.passes = [replaced(facts.passes[0], batches=())]


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (same_noise, True),
        (same_masks, False),
        (lambda facts: same_noise(facts, differs=0), False),  # one timestep for all samples
        (with_a_broadcast, False),
        (of_its_own, False),
        (a_shared_mask, False),
        (of_the_same_samples, False),
        (of_a_loader, False),
    ],
)
def test_noise_of_samples_is_no_warning(change: Change, fails: bool, tmp_path: Path) -> None:
    """Numbers that may be shared by design are only a warning, like dropout masks."""
    job = make(tmp_path, change)
    results = checks.checks_without_reference(job)
    (found,) = [r for r in results if r.check == "random streams"] or [None]
    is_warning = accepting.RANDOMNESS in accepting.kinds_that_only_warn(job, None, results)
    assert is_warning == (not fails)
    if fails:
        assert found is not None
        assert "ranks 0 and 1 have different samples" in found.first_reason
        assert "input 1 of the model" in found.first_reason
        (named,) = causes.diagnose(job, results)
        assert named.cause == "shared-rng-seed"
        assert "dropout" not in named.evidence


def test_what_is_not_accepted_still_fails(tmp_path: Path) -> None:
    def both(facts: Facts) -> None:
        same_masks(facts)
        facts.groups = ({"lr": LR + facts.rank},)

    kinds = [accepting.RANDOMNESS, accepting.RATES]
    verdicts, left = judge(tmp_path, kinds, both, lambda step: LR)
    assert verdicts["learning rate", "-"] == "fail"
    assert left == ["learning-rate-differs"]


@pytest.mark.parametrize(
    ("kind", "lr", "verdict", "left"),
    [
        (accepting.RATES, lambda step: LR / 2, "pass", []),
        (accepting.RATES, lambda step: LR / (2 + step), "fail", ["scheduler-steps-per-rank"]),
        (accepting.RATES, lambda step: float("nan"), "fail", ["learning-rate-differs"]),
        # The job steps its schedule twice at each of its steps: 2, 6, 10 after 2, 4, 6, 8, 10.
        (accepting.SCHEDULE, lambda step: 2.0 + 2 * step, "pass", []),
        (accepting.SCHEDULE, lambda step: 2.0 + 3 * step, "fail", ["scheduler-steps-per-rank"]),
    ],
)
def test_a_learning_rate_that_is_meant_has_to_be_what_it_promises(
    tmp_path: Path, kind: str, lr: Callable[[int], float], verdict: str, left: list[str]
) -> None:
    def steps_per_rank(facts: Facts) -> None:
        facts.groups = ({"lr": 2.0 + 4 * facts.step},)

    change = right if kind == accepting.RATES else steps_per_rank
    verdicts, causes_left = judge(tmp_path, [kind], change, lr, steps=5)
    assert (verdicts["learning rate", "full batch float32"], causes_left) == (verdict, left)


def test_other_settings_are_compared_beside_an_accepted_rate(tmp_path: Path) -> None:
    def decays(facts: Facts) -> None:
        facts.groups = ({"lr": LR, "weight_decay": 0.1},)

    job = make(tmp_path, decays)
    alone = reference(job, tmp_path, lr=lambda step: LR / 2)
    for seen in alone.replayed.steps:
        seen.groups[0]["weight_decay"] = 0.2
    results = judged(job, alone)
    named = causes.diagnose(job, results, alone)
    found = accepting.accept([accepting.RATES], job, alone, results, named)
    (rates,) = [r for r in found if (r.check, r.layer) == ("learning rate", "full batch float32")]
    assert rates.verdict == "fail"
    assert "weight_decay" in rates.reason


@pytest.mark.parametrize(("by", "verdict"), [(0.02, "pass"), (0.03, "fail")])
def test_momentum_follows_an_accepted_schedule(by: float, verdict: str, tmp_path: Path) -> None:
    """OneCycleLR, stepped once per rank."""

    def per_rank(facts: Facts) -> None:
        facts.groups = ({"lr": 2.0 + 4 * facts.step, "betas[0]": 0.9 - 0.04 * facts.step},)

    job = make(tmp_path, per_rank, steps=5)
    alone = reference(job, tmp_path, lr=lambda step: 2.0 + 2 * step)
    for seen in alone.replayed.steps:
        seen.groups[0]["betas[0]"] = 0.9 - by * seen.step
    results = judged(job, alone)
    named = causes.diagnose(job, results, alone)
    assert [one.cause for one in named] == ["scheduler-steps-per-rank"]
    found = accepting.accept([accepting.SCHEDULE], job, alone, results, named)
    (rates,) = [r for r in found if (r.check, r.layer) == ("learning rate", "full batch float32")]
    assert rates.verdict == verdict


@pytest.mark.parametrize(("by", "remark"), [("accelerate", True), ("", False)])
def test_accelerate_steps_a_schedule_once_per_rank(by: str, remark: bool, tmp_path: Path) -> None:
    def per_rank(facts: Facts) -> None:
        facts.groups = ({"lr": 2.0 + 4 * facts.step},)

    job = make(tmp_path, per_rank, steps=5)
    job = replace(job, ranks=tuple(structs.replace(one, schedules_by=by) for one in job.ranks))
    alone = reference(job, tmp_path, lr=lambda step: 2.0 + 2 * step)
    results = judged(job, alone)
    kinds = accepting.kinds_that_only_warn(job, alone, results)
    assert (accepting.SCHEDULE in kinds) == remark
    named = causes.diagnose(job, results, alone)
    found = accepting.accept(kinds, job, alone, results, named)
    (rates,) = [r for r in found if (r.check, r.layer) == ("learning rate", "full batch float32")]
    assert rates.verdict == ("pass" if remark else "fail")


@pytest.mark.parametrize(("by", "verdict"), [(2.0, "pass"), (1.9, "fail")])
def test_warm_up_may_start_at_a_common_rate(by: float, verdict: str, tmp_path: Path) -> None:
    """It rises to twice as much, from the rate that one process has at first."""

    def rises(facts: Facts) -> None:
        facts.groups = ({"lr": 0.1 + (by * LR - 0.1) * facts.step / 4, "initial_lr": 2 * LR},)

    job = make(tmp_path, rises)
    alone = reference(job, tmp_path, lr=lambda step: 0.1 + (LR - 0.1) * step / 4)
    for seen in alone.replayed.steps:
        seen.groups[0]["initial_lr"] = LR
    results = judged(job, alone)
    assert accepting.RATES in accepting.kinds_that_only_warn(job, alone, results)
    named = causes.diagnose(job, results, alone)
    found = accepting.accept([accepting.RATES], job, alone, results, named)
    assert [
        r.verdict for r in found if (r.check, r.layer) == ("learning rate", "full batch float32")
    ] == [verdict]


def test_a_schedule_that_cannot_be_seen_is_unknown(tmp_path: Path) -> None:
    def faster(facts: Facts) -> None:
        facts.groups = ({"lr": LR / (1 + 2 * facts.step)},)

    rates = [accepting.SCHEDULE]
    verdicts, _ = judge(tmp_path, rates, faster, lambda step: LR / (1 + step), steps=2)
    assert verdicts["learning rate", "full batch float32"] == "unknown"


def test_what_was_accepted_is_said_where_it_was_seen(tmp_path: Path) -> None:
    job = make(tmp_path, same_masks)
    named = causes.diagnose(job, checks.checks_without_reference(job))
    found = accepting.allowance_of_job([accepting.RANDOMNESS, accepting.RATES], named)
    assert found is not None
    assert found.kind == accepting.RANDOMNESS
    assert accepting.allowance_of_job([accepting.RATES], named) is None


@pytest.mark.parametrize(
    ("asked", "kinds", "said"),
    [
        (JobOptions, ("masks",), "choose shared-rng-seed, learning-rate-differs, scheduler-steps"),
        (JobOptions, (accepting.RATES, accepting.SCHEDULE), "takes one of"),
        (OfGuard, (accepting.RATES,), "not supported with --guard; it takes shared-rng-seed"),
    ],
)
def test_refused_kinds(asked: Callable[..., object], kinds: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asked(words=("python",), accept=kinds)
