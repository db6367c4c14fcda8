"""Every check of a job, on recordings that are made up: one change fails one check."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from distcheck.job import causes, checks, judging
from distcheck.job.checks import averaging, exchange, ranks
from distcheck.job.checks.reference import checks_with_reference
from distcheck.job.judging import only_source_line
from distcheck.job.options import JobOptions
from distcheck.job.running import CommandResult
from distcheck.judge.divergence.noise_floor import tolerance
from distcheck.recordings.jobs.records import ClipCall, CollectiveCall, LossCall
from distcheck.records import CheckResult, Diagnosis, VerdictName
from distcheck.records.layers import ROUNDING
from tests.job.recordings import (
    LR,
    SHAPES,
    Facts,
    Tensors,
    gradients,
    judged,
    make,
    mean,
    reference,
    replaced,
)


def failed(results: list[CheckResult]) -> set[tuple[str, str]]:
    return {(r.check, r.layer) for r in results if r.verdict == "fail"}


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_right_recording_passes(tmp_path: Path, world: int) -> None:
    job = make(tmp_path, world=world)
    results = judged(job, reference(job, tmp_path))
    assert {r.verdict for r in results} == {"pass"}
    assert causes.diagnose(job, results) == []
    of_gradients = next(r for r in results if r.check == "gradients")
    assert (of_gradients.compared.ranks, of_gradients.compared.steps) == (world, 3)
    assert of_gradients.compared.elements == 16 * 3 * world


def test_losses_that_are_no_numbers_are_no_terms(tmp_path: Path) -> None:
    """JSON has no NaN, so a recording leaves such a loss out."""

    def change(facts: Facts) -> None:
        facts.raw = {name: 3 * gradient for name, gradient in facts.raw.items()}
        facts.passes = [replaced(facts.a_pass(n), loss=None) for n in range(2)]

    results = checks.checks_without_reference(make(tmp_path, change))
    assert ("gradients", "rounding") in failed(results)


def test_what_all_ranks_draw_to_take_their_parts_of_is_right(tmp_path: Path) -> None:
    """Where no loader has handed out a batch, the script has drawn its samples."""

    def slices(facts: Facts) -> None:
        same_noise(facts)
        facts.passes = [replaced(one, batches=()) for one in facts.passes]

    assert not failed(checks.checks_without_reference(make(tmp_path, slices)))


def at_step_one(facts: Facts, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if facts.step == 1:
        facts.raw = {name: change(gradient) for name, gradient in facts.raw.items()}


def same_samples(facts: Facts) -> None:
    facts.rows = tuple(f"{facts.step}-{i}" for i in range(4))
    facts.passes = [facts.a_pass(0)]


def overlap(facts: Facts) -> None:
    """Each rank reads all of the data, in an order of its own."""
    facts.rows = tuple(f"{(facts.step + facts.rank) % 3}-{i}" for i in range(4))
    facts.epoch = 0
    facts.passes = [facts.a_pass(0)]


def no_set_epoch(facts: Facts) -> None:
    facts.sampler_epoch = 0


def own_start(facts: Facts) -> None:
    if facts.rank == 1:
        facts.before = {n: p + (facts.step == 0) for n, p in facts.before.items()}
        if facts.step == 0:
            facts.after = {n: p - 1 - 0.5 * facts.raw[n] for n, p in facts.before.items()}


def same_masks(facts: Facts) -> None:
    facts.passes = [replaced(facts.a_pass(0), draws=True, random={"torch": str(facts.step)})]


def same_noise(facts: Facts) -> None:
    facts.passes = [replaced(facts.a_pass(0), drew=True, random={"torch": str(facts.step)})]


def other_rate(facts: Facts) -> None:
    facts.groups = ({"lr": 0.5 + 0.25 * facts.rank},)


def other_scale(facts: Facts) -> None:
    facts.scale = 2.0**facts.rank
    facts.passes = [facts.a_pass(0, loss=2.0 * facts.scale)]


def clipped_while_scaled(facts: Facts) -> None:
    facts.scale = 2.0
    facts.passes = [facts.a_pass(0, loss=4.0)]
    facts.clips = (ClipCall(kind="norm", most=1.0, norm=0.5, scaled=True),)


def drift(facts: Facts) -> None:
    if (facts.rank, facts.step) == (1, 2):
        facts.after = {n: p.clone() for n, p in facts.before.items()}


def owned(facts: Facts) -> None:
    """Each rank steps the parameter that it owns, and keeps the other one."""
    name = list(SHAPES)[facts.rank]
    facts.after = {**facts.before, name: facts.before[name] - 0.5 * facts.raw[name]}


def unsynced(facts: Facts) -> None:
    facts.raw = facts.local


def vectors_unsynced(facts: Facts) -> None:
    facts.raw = {**facts.raw, "bias": facts.local["bias"]}


def clipped_first(facts: Facts) -> None:
    facts.at_step = {n: 0.5 * g for n, g in facts.raw.items()}
    facts.raw = facts.local
    facts.clips = (ClipCall(kind="norm", most=1.0, norm=2.0),)


def clipped_twice(facts: Facts) -> None:
    facts.at_step = {n: 0.25 * g for n, g in facts.raw.items()}
    facts.clips = (ClipCall(kind="norm", most=1.0, norm=2.0),)


def halved(facts: Facts) -> None:
    at_step_one(facts, lambda g: g / 2)


def a_little(facts: Facts) -> None:
    at_step_one(facts, lambda g: g * (1 + 1e-5))


def not_scaled(facts: Facts) -> None:
    facts.passes = [facts.a_pass(0), facts.a_pass(1)]


def scaled_twice(facts: Facts) -> None:
    facts.passes = [facts.a_pass(i, loss=0.5) for i in range(2)]


def wrong_pass(facts: Facts) -> None:
    facts.raw = facts.local
    facts.passes = [facts.a_pass(i, loss=1.0, exchanges=i == 0) for i in range(2)]


R = "rounding"
CHANGES = (
    (same_samples, {("data", "-")}, "same-data"),
    (overlap, {("data", "-")}, "overlapping-data"),
    (no_set_epoch, {("epoch order", "-")}, "missing-set-epoch"),
    (own_start, {("initial state", "-"), ("agreement", "-")}, "initial-state-differs"),
    (same_masks, {("random streams", "-")}, "shared-rng-seed"),
    (same_noise, {("random streams", "-")}, "shared-rng-seed"),
    (other_rate, {("learning rate", "-")}, "learning-rate-differs"),
    (other_scale, {("loss scaler", "-")}, "scaler-skips-differ"),
    (clipped_while_scaled, {("loss scaler", "-")}, "clip-before-unscale"),
    (drift, {("agreement", "-")}, "unexplained"),
    (owned, {("agreement", "-")}, "missing-broadcast"),
    (unsynced, {("gradients", R), ("agreement", "-")}, "missing-sync"),
    (vectors_unsynced, {("gradients", R), ("agreement", "-")}, "partial-sync"),
    (clipped_first, {("gradients", R), ("clipping", R)}, "clip-before-sync"),
    (clipped_twice, {("clipping", R)}, "clip-by-local-norm"),
    (halved, {("gradients", R)}, "double-division"),
    (a_little, {("gradients", R)}, "wrong-divisor"),
    (not_scaled, {("loss scale", "-")}, "accumulation-not-scaled"),
    (scaled_twice, {("loss scale", "-")}, "accumulation-scaled-twice"),
    (wrong_pass, {("gradients", R), ("agreement", "-")}, "sync-in-wrong-micro-batch"),
)


@pytest.mark.parametrize(
    ("change", "fails", "cause"), CHANGES, ids=lambda v: getattr(v, "__name__", "")
)
def test_one_change_fails_one_check_and_is_named(
    tmp_path: Path, change: Callable[[Facts], None], fails: set[tuple[str, str]], cause: str
) -> None:
    job = make(tmp_path, change)
    results = checks.checks_without_reference(job)
    assert failed(results) == fails
    found = causes.diagnose(job, results)
    assert [one.cause for one in found] == [cause]
    assert found[0].evidence
    assert found[0].suggestion


def test_averages_of_the_model_that_differ_are_a_remark(tmp_path: Path) -> None:
    def averages(facts: Facts) -> None:
        facts.of_record = {"averages": {"ema": f"{facts.step} of rank {facts.rank * facts.step}"}}

    (remark,) = causes.differing_model_averages(make(tmp_path, averages))
    assert remark.cause == "ema-differs"
    assert "(ema, " in remark.evidence


def test_a_sum_passes_with_a_remark(tmp_path: Path) -> None:
    def summed(facts: Facts) -> None:
        facts.raw = {name: 2 * gradient for name, gradient in facts.raw.items()}

    job = make(tmp_path, summed)
    result = next(r for r in checks.checks_without_reference(job) if r.check == "gradients")
    assert result.verdict == "pass"
    assert "the sum of the ranks' gradients" in result.reason
    results, _ = checks_with_reference(job, reference(job, tmp_path))
    assert failed(results) == {("gradients", "full batch float32")}
    named = causes.diagnose(job, results, reference(job, tmp_path))
    assert [one.cause for one in named] == ["missing-division"]


def test_gradients_of_zero_are_unknown(tmp_path: Path) -> None:
    def vanish(facts: Facts) -> None:
        facts.local = facts.raw = {n: torch.zeros(shape) for n, shape in SHAPES.items()}

    results = {r.check: r for r in checks.checks_without_reference(make(tmp_path, vanish))}
    assert results["gradients"].verdict == "unknown"
    assert "exactly zero" in results["gradients"].reason


def test_tokens_count_by_their_number(tmp_path: Path) -> None:
    def uneven(facts: Facts) -> None:
        one = facts.passes[0]
        counted = (4, 12)[facts.rank]
        call = replaced(one).losses[0]
        facts.passes = [
            replaced(one, losses=(type(call)(**{**_fields(call), "counted": counted}),))
        ]

    def weighted(facts: Facts) -> None:
        uneven(facts)
        facts.raw = {n: 0.25 * facts.locals[0][n] + 0.75 * facts.locals[1][n] for n in SHAPES}

    (tmp_path / "right").mkdir()
    right = make(tmp_path / "right", weighted)
    assert failed(checks.checks_without_reference(right)) == set()
    (tmp_path / "wrong").mkdir()
    wrong = make(tmp_path / "wrong", uneven)
    results = checks.checks_without_reference(wrong)
    assert failed(results) == {("gradients", R)}
    assert [one.cause for one in causes.diagnose(wrong, results)] == ["unweighted-tokens"]


def _fields(call: object) -> dict[str, object]:
    return {name: getattr(call, name) for name in call.__struct_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "pass"), (1 + 1e-5, "fail")])
def test_sums_in_place_of_tensors_still_judge(tmp_path: Path, factor: float, verdict: str) -> None:
    job = make(tmp_path, lambda facts: at_step_one(facts, lambda g: g * factor), budget=0)
    assert not any(record.whole for record in job.records.values())
    result = next(r for r in checks.checks_without_reference(job) if r.check == "gradients")
    assert result.verdict == verdict
    assert result.compared.elements == 2 * 64 * 3 * 2


@pytest.mark.parametrize(
    ("changes", "fails", "cause"),
    [
        ({"raw": 2.0, "clipped": 2.0}, "gradients", "double-division"),
        ({"raw": 0.5, "clipped": 0.5}, "gradients", "missing-division"),
        ({"raw": 1 + 1e-5}, "gradients", "wrong-divisor"),
        ({"lr": lambda step: 0.25}, "learning rate", "learning-rate-differs"),
        ({"lr": lambda step: 0.5 / (1 + step)}, "learning rate", "scheduler-steps-per-rank"),
        ({"after": 0.51}, "parameters", "wrong-update"),
    ],
)
def test_the_reference_shows_what_ranks_have_in_common(
    tmp_path: Path, changes: dict[str, object], fails: str, cause: str
) -> None:
    job = make(tmp_path)
    alone = reference(job, tmp_path, **changes)
    assert failed(checks.checks_without_reference(job)) == set()
    results, _ = checks_with_reference(job, alone)
    assert {check for check, _ in failed(results)} == {fails}
    assert [one.cause for one in causes.diagnose(job, results, alone)] == [cause]


def test_what_follows_from_ranks_that_have_parted_is_not_named(tmp_path: Path) -> None:
    job = make(tmp_path, lambda facts: (other_rate(facts), drift(facts))[0])
    alone = reference(job, tmp_path, raw=0.9)
    results = judged(job, alone)
    assert ("agreement", "-") in failed(results)
    named = {one.cause for one in causes.diagnose(job, results, alone)}
    assert named == {"learning-rate-differs", "wrong-divisor"}  # the factor is there before


@pytest.mark.parametrize(
    ("alone_clips", "cause"),
    [
        ((4e9, 1.0), "clip-norm-differs"),
        ((1e9, 2.0), "clip-by-local-norm"),
        ((1e9, 1.0), "gradients-modified-before-step"),
    ],
)
def test_what_the_optimizer_was_given_is_compared_where_it_clips(
    tmp_path: Path, alone_clips: tuple[float, float], cause: str
) -> None:
    def clipped(facts: Facts) -> None:
        facts.clips = (ClipCall(kind="norm", most=1e9, norm=1.0),)

    job = make(tmp_path, clipped)
    alone = reference(job, tmp_path, clipped=0.5, clips=(alone_clips,))
    results = judged(job, alone)
    assert failed(results) == {("clipped gradients", "full batch float32")}
    assert [one.cause for one in causes.diagnose(job, results, alone)] == [cause]


@pytest.mark.parametrize("counted", [("weight",), ("bias",), ("weight", "bias"), ()], ids=str)
def test_tensors_that_a_norm_includes_twice_are_named(
    counted: tuple[str, ...], tmp_path: Path
) -> None:
    """Clipping by hand to norm 1; () clips by another wrong norm."""

    def clips(facts: Facts) -> None:
        squares = {name: float(g.square().sum()) for name, g in facts.raw.items()}
        norm = sum(by * (1 + (name in counted)) for name, by in squares.items()) ** 0.5
        norm *= 1 if counted else 1.1
        facts.at_step = {name: g / norm for name, g in facts.raw.items()}

    job = make(tmp_path, clips)
    alone = reference(job, tmp_path)
    steps = tuple(msgspec.structs.replace(s, changes=True) for s in alone.replayed.steps)
    alone = dataclasses.replace(
        alone, replayed=msgspec.structs.replace(alone.replayed, steps=steps)
    )
    for step in job.steps:
        kept = alone.tensors(step)
        raw = {name: kept[f"raw/{name}"] for name in SHAPES}
        norm = sum(float(g.square().sum()) for g in raw.values()) ** 0.5
        kept |= {f"step/{name}": g / norm for name, g in raw.items()}
    (found,) = causes.diagnose(job, judged(job, alone), alone)
    if not counted:
        assert found.cause == "gradients-modified-before-step"
        return
    assert found.cause == "clip-norm-includes-replicas"
    assert (
        f"as if {', '.join(map(repr, sorted(counted)))} (of {len(counted)} in all)"
        in found.evidence
    )
    assert "included 2 times in the norm" in found.evidence


def test_a_tolerance_grows_with_what_was_measured_alone() -> None:
    given = {"world": 4, "unit": 2.0**-24}
    narrow = tolerance(0.0, 1.0, 1.0, **given)  # type: ignore[arg-type]
    assert narrow < 5e-7
    assert tolerance(1e-3, 1.0, 1.0, **given) - narrow == pytest.approx(8e-3)  # type: ignore[arg-type]
    assert tolerance(float("nan"), 1.0, 1.0, **given) == narrow  # type: ignore[arg-type]


def test_gradients_are_drawn_apart() -> None:
    assert not torch.equal(gradients(0, 0)["bias"], gradients(1, 0)["bias"])


def summed(loss: float, value: float, counted: int) -> Callable[[Facts], None]:
    """Losses of two passes that are sums over targets, divided by a number."""

    def change(facts: Facts) -> None:
        about = {"name": "cross_entropy", "reduction": "sum", "target": ""}
        call = LossCall(value=value * (1 + facts.rank), counted=counted * (1 + facts.rank), **about)
        facts.passes = [facts.a_pass(i, loss=loss, losses=(call,)) for i in range(2)]

    return change


def test_sums_over_targets_are_judged_by_what_they_are_divided_by(tmp_path: Path) -> None:
    """Ranks have 8 and 16 targets of value 2: the mean of all is 2, over 2 ranks and 2 passes."""
    for name, loss, verdict in (("right", 1.0, "pass"), ("wrong", 2.0, "fail")):
        (tmp_path / name).mkdir()
        job = make(tmp_path / name, summed(loss, 8.0, 4))
        assert exchange.factors_of_sum_losses(job, 0) == [2 * loss / 2] * 2
        result = next(r for r in checks.checks_without_reference(job) if r.check == "loss scale")
        assert (result.verdict, result.compared.ranks) == (verdict, 2)


@pytest.mark.parametrize(
    ("rows", "weights", "cause"),
    [((4, 12), (0.25, 0.75), "unweighted-mean"), ((4, 4), (0.2, 0.8), "unweighted-tokens")],
)
def test_ranks_that_count_alike_and_should_not_are_named(
    tmp_path: Path, rows: tuple[int, int], weights: tuple[float, float], cause: str
) -> None:
    """One process weighs the ranks' gradients, by their samples or by what is not seen."""

    def uneven(facts: Facts) -> None:
        facts.rows = tuple(f"{facts.rank}-{facts.step}-{i}" for i in range(rows[facts.rank]))
        facts.passes = [facts.a_pass(0)]

    job = make(tmp_path, uneven)
    alone = reference(job, tmp_path, weights=weights)
    results = judged(job, alone)
    assert failed(results) == {("gradients", "full batch float32")}
    found = causes.diagnose(job, results, alone)
    assert [one.cause for one in found] == [cause]
    assert ", ".join(map(str, weights)) in found[0].evidence


def test_what_the_optimizer_gets_outranks_what_was_seen_on_the_way(tmp_path: Path) -> None:
    """The loss times 2, and gradients halved after the exchange; the loss is printed otherwise."""

    def scaled(facts: Facts) -> None:
        facts.at_step = facts.raw
        facts.raw = {name: 3 * one for name, one in facts.raw.items()}

    job = make(tmp_path, scaled)
    assert failed(checks.checks_without_reference(job)) == {("gradients", R)}
    alone = reference(job, tmp_path, loss=2.5)
    results = judged(job, alone)
    assert failed(results) == set()
    assert any(
        "the gradients passed to the optimizer match the reference" in r.reason for r in results
    )
    wrong = reference(job, tmp_path, clipped=1.5)
    assert ("gradients", R) in failed(judged(job, wrong))


@pytest.mark.parametrize(("most", "ok"), [(0.2, True), (0.1, False)])
def test_clipping_does_not_hide_wrong_gradients(tmp_path: Path, most: float, ok: bool) -> None:
    """Sums in place of means: right where clipping allows twice as much and they are halved later.
    Where it allows the same, the first ones that do not reach the limit step twice as far.
    """

    def sums(facts: Facts) -> None:
        facts.at_step = {n: 0.1 * one for n, one in facts.raw.items()}
        facts.raw = {n: 2.5 * one for n, one in facts.raw.items()}
        facts.clips = (ClipCall(kind="norm", most=most * 1.25, norm=2.5),)

    job = make(tmp_path, sums)
    alone = reference(job, tmp_path, clipped=0.1, clips=((0.125, 1.25),))
    assert (failed(judged(job, alone)) == set()) is ok
    assert (("gradients", R) in failed(judged(job, alone))) is not ok


@pytest.mark.parametrize(("factor", "printed", "ok"), [
    (1 + 1e-5, 1 + 1e-5, False), (1.0, 1 + 1e-5, True), (1.0, 3.0, True),
])  # fmt: skip
def test_a_wrong_loss_is_in_all(tmp_path: Path, factor: float, printed: float, ok: bool) -> None:
    """One part in a hundred thousand is within the tolerance of each gradient."""

    def off(facts: Facts) -> None:
        facts.locals = [{n: one * factor for n, one in g.items()} for g in facts.locals]
        facts.local = facts.locals[facts.rank]
        facts.raw = {n: one * factor for n, one in facts.raw.items()}

    job = make(tmp_path, off)
    alone = reference(job, tmp_path, loss=2.0 / printed, spread=1e-5)
    results = judged(job, alone)
    assert failed(results) == (set() if ok else {("loss", "full batch float32")})
    named = [one.cause for one in causes.diagnose(job, results, alone)]
    assert named == ([] if ok else ["wrong-divisor"])


def test_optimizers_may_have_parts_of_the_parameters(tmp_path: Path) -> None:
    """Each rank steps for its own, and hands the result on."""

    def divides(facts: Facts) -> None:
        facts.holds = (tuple(SHAPES)[facts.rank],)

    job = make(tmp_path, divides)
    assert (job.parameters(0), job.holders(0, "weight"), job.holders(0, "bias")) == (
        ("weight", "bias"), [0], [1]
    )  # fmt: skip
    results = judged(job, reference(job, tmp_path))
    assert {r.verdict for r in results if r.check != "random streams"} == {"pass"}
    stepped = next(r for r in results if r.check == "parameters")
    assert (stepped.compared.tensors, stepped.compared.ranks) == (2, 2)


def test_what_a_rank_stepped_to_and_did_not_hand_on_is_named(tmp_path: Path) -> None:
    def divides(facts: Facts) -> None:
        facts.holds = (tuple(SHAPES)[facts.rank],)
        if facts.step and facts.rank == 1:
            facts.before = {**facts.before, "weight": facts.before["weight"] + 1}

    job = make(tmp_path, divides)
    found = causes.diagnose(job, judged(job, reference(job, tmp_path)), reference(job, tmp_path))
    assert [one.cause for one in found] == ["missing-broadcast"]
    assert "only the optimizer of rank 0 has weight" in found[0].evidence


def own_mean(start: Tensors, after: list[Tensors]) -> Tensors:
    return mean(after)


def own_sum(start: Tensors, after: list[Tensors]) -> Tensors:
    return {name: 2 * one for name, one in mean(after).items()}


def outer_step(start: Tensors, after: list[Tensors]) -> Tensors:
    """Three times as far as the mean, as with momentum."""
    return {name: 3 * one - 2 * start[name] for name, one in mean(after).items()}


def first_rank(start: Tensors, after: list[Tensors]) -> Tensors:
    return after[0]


@pytest.mark.parametrize(
    ("joined", "verdict", "named"),
    [
        (own_mean, "unknown", []),
        (outer_step, "unknown", []),
        (own_sum, "fail", ["wrong-divisor"]),
        (first_rank, "fail", ["missing-sync"]),
    ],
)
def test_ranks_that_average_parameters_are_another_algorithm(
    tmp_path: Path, joined: Callable[[Tensors, list[Tensors]], Tensors], verdict: str,
    named: list[str],
) -> None:  # fmt: skip
    """Local SGD: every step is by the rank's own gradients, and parameters are joined after it."""

    def own_steps(facts: Facts) -> None:
        start = gradients(7, 0)
        after = [{n: p - LR * gradients(r, 0)[n] for n, p in start.items()} for r in range(2)]
        facts.before = joined(start, after) if facts.step else start
        facts.raw = facts.local

    job = make(tmp_path, own_steps, steps=2)
    asked = JobOptions(words=("python", "train.py"), steps=2)
    case = judging.judge(asked, job, CommandResult(0, ()), reference(job, tmp_path), "")
    assert (case.verdict, [one.cause for one in case.diagnosis]) == (verdict, named)


@pytest.mark.parametrize(
    ("joined", "said"),
    [
        ((1, 2, 3, 4), "again before each step (local SGD)"),
        ((2, 4), "again every 2 steps (local SGD)"),
        ((1, 3, 4), "again before step 1 (local SGD)"),
        ((3,), "again before step 3 (local SGD)"),
    ],
)
def test_the_averaging_time_is_said(tmp_path: Path, joined: tuple[int, ...], said: str) -> None:
    def own_steps(facts: Facts) -> None:
        if facts.step in (0, *joined):
            facts.before = gradients(7, facts.step)
        facts.raw = facts.local

    found = averaging.averaging(make(tmp_path, own_steps, steps=5))
    assert found is not None
    assert said in found.reason


def test_of_sums_alone_nothing_is_said_but_that(tmp_path: Path) -> None:
    """Beyond the budget a multiple of the mean does not show."""

    def own_steps(facts: Facts) -> None:
        start = gradients(7, 0)
        after = [{n: p - LR * gradients(r, 0)[n] for n, p in start.items()} for r in range(2)]
        facts.before = own_sum(start, after) if facts.step else start
        facts.raw = facts.local

    job = make(tmp_path, own_steps, steps=2, budget=0)
    found = averaging.averaging(job)
    assert found is not None
    assert (found.verdict, found.compared.elements) == ("unknown", 0)


def test_ranks_that_part_by_the_same_gradients_do_not_average(tmp_path: Path) -> None:
    """Another rate on one rank, and something that makes them alike again."""

    def parts(facts: Facts) -> None:
        rates = [LR, 2 * LR]
        if facts.step:
            given = mean([gradients(rank, 0) for rank in range(2)])
            start = gradients(7, 0)
            facts.before = mean([{n: p - r * given[n] for n, p in start.items()} for r in rates])
        else:
            facts.after = {n: p - rates[facts.rank] * facts.raw[n] for n, p in facts.before.items()}

    job = make(tmp_path, parts, steps=2)
    assert averaging.averaging(job) is None
    assert ("agreement", "-") in failed(checks.checks_without_reference(job))


@pytest.mark.parametrize(
    ("flags", "expected"), [((True, True), 3), ((False, True), 0), ((True, False), 0)]
)
def test_early_exchanges_counted(tmp_path: Path, flags: tuple[bool, bool], expected: int) -> None:
    def accumulates(facts: Facts) -> None:
        facts.passes = [
            facts.a_pass(i, loss=1.0, exchanges=flags[i], exchange_s=[0.25, None][i])
            for i in range(2)
        ]

    count, size, seconds = exchange.redundant_synchronization(make(tmp_path, accumulates))
    assert count == expected
    assert seconds == (None if flags == (True, False) else 0.25)
    assert size == (0 if flags == (True, False) else 16 * 4)


@pytest.mark.parametrize("budget", [1 << 20, 0], ids=["whole", "sums"])
@pytest.mark.parametrize(
    ("of_passes", "off", "verdict"),
    [(True, 1e-7, "pass"), (True, 1e-5, "fail"), (False, 1e-7, "fail")],
)
def test_passes_that_cancel_round_by_their_own_sizes(
    tmp_path: Path, budget: int, of_passes: bool, off: float, verdict: str
) -> None:
    """Two passes of +1 and -1, each exchanged: what they add up to is far smaller than they."""

    def cancel(facts: Facts) -> None:
        facts.passes = [facts.a_pass(i, loss=1.0, exchanges=True) for i in range(2)]
        facts.local = {name: torch.full(shape, 1e-4) for name, shape in SHAPES.items()}
        facts.raw = {name: one + off for name, one in facts.local.items()}
        if of_passes:
            facts.sizes = {name: torch.full(shape, 2.0) for name, shape in SHAPES.items()}

    results = checks.checks_without_reference(make(tmp_path, cancel, budget=budget))
    found = next(r for r in results if r.check == "gradients")
    assert (found.verdict, found.compared.ranks) == (verdict, 2)


@pytest.mark.parametrize(
    ("cause", "exchange", "line"),
    [
        ("double-division", "pass", 8),
        ("double-division", "fail", 5),
        ("missing-division", "pass", None),
        ("dropped-rank", "pass", None),
        ("double-division", "unknown", None),
    ],
    ids=str,
)
def test_a_division_too_many_is_of_the_loss_where_the_exchange_is_right(
    cause: str, exchange: VerdictName, line: int | None
) -> None:
    """A sum passes as well as a mean, so that a factor too many may be of either line."""
    step = SimpleNamespace(
        calls=[CollectiveCall("all_reduce", "train.py:5", elements=9, after_backward=True)],
        lines={"backward": ("train.py:8",)},
    )
    job: Any = SimpleNamespace(records={(0, 0): step})
    result = CheckResult(check="gradients", layer=ROUNDING, verdict=exchange)
    found = [Diagnosis(cause=cause, evidence="", suggestion="")]
    site = only_source_line(job, "train.py", found, [result])
    assert (site and site.line) == line


def test_a_clip_between_passes_explains_what_one_batch_does_not_give(tmp_path: Path) -> None:
    """Also where every pass was exchanged, so that ranks hold what one process holds."""
    job = make(tmp_path, not_scaled)
    step = job.records[0, 1]
    assert causes.clipping_between_passes(job, 1) is None
    clips = (ClipCall(kind="norm", most=1.0, norm=2.0, passes=1),)
    passes = (*step.passes, *step.passes)
    job.records[0, 1] = msgspec.structs.replace(step, clips=clips, passes=passes)
    found = causes.clipping_between_passes(job, 1)
    assert found is not None
    assert found.cause == "clip-in-accumulation"
    assert f"after 1 of {len(passes)} backward passes" in found.evidence


@pytest.mark.parametrize("moves", [True, False])
def test_an_average_within_the_model_is_a_remark(tmp_path: Path, moves: bool) -> None:
    """What no gradient and no optimizer moves, and that moves; what stands still is frozen, and
    goes into every output.
    """

    def holds_an_average(facts: Facts) -> None:
        facts.holds = ("weight",)
        facts.local = {"weight": facts.local["weight"]}
        facts.before["bias"] = torch.full((4,), float(facts.rank + moves * facts.step))

    job = make(tmp_path, holds_an_average)
    fails = failed(checks.checks_without_reference(job))
    assert (("initial state", "-") in fails) == (not moves)
    assert [one.cause for one in causes.differing_model_averages(job)] == ["ema-differs"] * moves


def test_a_rate_that_was_sent_in_float32_is_that_of_one_process(tmp_path: Path) -> None:
    rate = float(torch.tensor(1e-3))
    assert rate != 1e-3

    def rounded(facts: Facts) -> None:
        facts.groups = ({"lr": rate},)

    job = make(tmp_path, rounded)
    for other, verdict in ((1e-3, "pass"), (1.000001e-3, "fail")):
        results, _ = checks_with_reference(job, reference(job, tmp_path, lr=lambda _: other))  # noqa: B023
        assert next(r.verdict for r in results if r.check == "learning rate") == verdict


def test_an_average_may_move_on_the_rank_alone_that_it_does_not_begin_with(tmp_path: Path) -> None:
    """Its updates are less than rounding where it equals the model; a frozen copy never moves."""
    job = make(tmp_path, steps=2)
    for (rank, step), record in job.records.items():
        own = {"before/ema.weight": f"{rank} {rank * step}", "before/frozen.weight": str(rank)}
        own |= {"before/ema.bias": str(rank)}
        held = {**record.digests, **own}
        job.records[rank, step] = msgspec.structs.replace(record, digests=held)
    assert ranks.averaged_parameters(job) == ["ema.weight", "ema.bias"]
