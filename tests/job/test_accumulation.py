"""Accumulation, also where one process makes the same mistake: next to one batch, and by pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from distcheck.job import causes, checks
from distcheck.job.checks.accumulation import accumulation
from distcheck.job.checks.reference import checks_with_reference
from distcheck.job.inside.batch_source import ALL, BatchSource
from distcheck.job.inside.merged_batch import MergedBatch, factor_from_mean_to_loss
from distcheck.job.settings import ReplayTask
from distcheck.recordings.jobs.records import ClipCall, LossFactor, LossTerm
from distcheck.records import CheckResult
from tests.job.recordings import Facts, gradients, make, reference

WEIGHTED = LossTerm(
    name="ce",
    reduction="mean",
    call=0,
    factors=(LossFactor(number=1 / 3, computed=True, outer=True),),
)
Turn = tuple[float | None, float]  # the factor of a step, and how far its direction is off


def passes_of(count: Callable[[int], int], **about: Any) -> Callable[[Facts], None]:
    """So many backward passes at each step, of a loss that torch did not compute."""

    def change(facts: Facts) -> None:
        facts.passes = [
            facts.a_pass(i, **{"losses": (), "rows": (*facts.rows, f"micro-batch {i}"), **about})
            for i in range(count(facts.step))
        ]

    return change


def judge(
    folder: Path, count: Callable[[int], int], folded: Callable[[int], Turn], **changes: Any
) -> tuple[CheckResult, list[str]]:
    """The check, and the causes that are named; every other check passes."""
    job = make(folder, passes_of(count, **changes.pop("about", {})))
    alone = reference(job, folder, folded=folded, **changes)
    (result,) = accumulation(job, alone)
    others = [r for r in checks.checks_without_reference(job) if r.compared.elements]
    others += [r for r in checks_with_reference(job, alone)[0] if r.check != "loss"]
    assert {r.verdict for r in others} == {"pass"}
    return result, [d.cause for d in causes.diagnose(job, [*others, result], alone)]


@pytest.mark.parametrize(
    ("count", "folded", "cause"),
    [
        (lambda s: 3, lambda s: (3.0, 0.0), "accumulation-not-scaled"),
        (lambda s: 3, lambda s: (1 / 3, 0.0), "accumulation-scaled-twice"),
        (lambda s: 3 if s else 1, lambda s: (1.0 if s else 1 / 3, 0.0), "uneven-accumulation"),
        (lambda s: 5 if s == 2 else 3, lambda s: (5 / 3 if s == 2 else 1.0, 0.0),
         "uneven-accumulation"),
        (lambda s: 3, lambda s: (1.0, 1e-4), "unexplained"),
    ],
)  # fmt: skip
def test_a_mistake_of_one_process_is_seen_next_to_one_batch(
    tmp_path: Path, count: Callable[[int], int], folded: Callable[[int], Turn], cause: str
) -> None:
    result, named = judge(tmp_path, count, folded)
    assert (result.verdict, named) == ("fail", [cause])


def test_passes_that_count_alike_over_unlike_numbers_of_targets_are_named(tmp_path: Path) -> None:
    def uneven(facts: Facts) -> None:
        call = facts.passes[0].losses[0]
        calls = [msgspec.structs.replace(call, counted=n) for n in (2, 6)]
        facts.passes = [facts.a_pass(i, loss=1.0, losses=(calls[i],)) for i in range(2)]

    job = make(tmp_path, uneven)
    alone = reference(job, tmp_path, folded=lambda s: (1.0, 0.1))
    results = [*checks.checks_without_reference(job), *accumulation(job, alone)]
    (named,) = causes.diagnose(job, results, alone)
    assert named.cause == "unweighted-tokens"
    assert "2, 6, 2, 6 targets" in named.evidence


@pytest.mark.parametrize(
    ("count", "folded", "changes"),
    [
        (lambda s: 3, lambda s: (1.0, 0.0), {}),
        (lambda s: 3, lambda s: (1.0, 1e-9), {}),
        (lambda s: 3, lambda s: (0.3, 0.0), {}),  # a loss may have a weight
        (lambda s: 3, lambda s: (1 / (1 + s), 0.0), {}),  # which may change
        (lambda s: 3, lambda s: (3.0, 0.0), {"kind": "sum"}),  # sums have no scale of their own
        # So may one whose weight is one over the passes.
        (lambda s: 3, lambda s: (1 / 3, 0.0), {"about": {"terms": (WEIGHTED,)}}),
        # The last step of an epoch of four batches has one pass, divided by 3: said, not accused.
        (lambda s: 1 if s == 1 else 3, lambda s: (1 / 3 if s == 1 else 1.0, 0.0), {}),
    ],
)
def test_a_right_accumulation_is_not_accused(
    tmp_path: Path, count: Callable[[int], int], folded: Callable[[int], Turn], changes: Any
) -> None:
    result, named = judge(tmp_path, count, folded, **changes)
    assert (result.verdict, named) == ("pass", [])
    assert result.compared.elements == 16 * 3


def test_nothing_is_said_where_nothing_was_folded(tmp_path: Path) -> None:
    job = make(tmp_path, passes_of(lambda s: 3))
    assert [*accumulation(job, reference(job, tmp_path))] == []


@pytest.mark.parametrize(
    ("about", "cause"),
    [
        ({"carried": True}, "accumulated-gradient"),
        ({"clips": (ClipCall(kind="norm", most=9e9, norm=1.0, passes=1),)}, "clip-in-accumulation"),
    ],
)
def test_mistakes_between_passes_named(tmp_path: Path, about: dict[str, Any], cause: str) -> None:
    def change(facts: Facts) -> None:
        passes_of(lambda s: 3)(facts)
        facts.carried = "carried" in about and facts.step > 0
        facts.clips = about.get("clips", ())
        if facts.step and "clips" in about:
            facts.raw = {name: g + gradients(8, facts.step)[name] for name, g in facts.raw.items()}

    job = make(tmp_path, change)
    results = checks.checks_without_reference(job)
    assert [d.cause for d in causes.diagnose(job, results)] == [cause]


@pytest.mark.parametrize(("loss", "verdict"), [(2.0, "pass"), (1.0, "fail")])
def test_gradients_may_be_divided_at_the_end(tmp_path: Path, loss: float, verdict: str) -> None:
    """By their number, in place of the losses; beside the losses it is once too often."""

    def change(facts: Facts) -> None:
        facts.passes = [facts.a_pass(i, loss=loss) for i in range(2)]
        facts.raw = {name: gradient / 2 for name, gradient in facts.raw.items()}

    results = {r.check: r for r in checks.checks_without_reference(make(tmp_path, change))}
    assert results["gradients"].verdict == verdict
    assert results["loss scale"].verdict == "pass"


# -- in a replay ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "factor"),
    [
        (lambda v: v.mean() / 4, 0.25),
        (lambda v: 0.5 * (-v.mean() / 2).clone(), -0.25),
        (lambda v: v.mean(), 1.0),
        (lambda v: (v / 4).mean() / 2, 0.125),
        (lambda v: v.sum() / 4, 0.0),
        (lambda v: v.mean() * v.sum(), 0.0),
        (lambda v: v.mean() + v.sum(), 0.0),
        (lambda v: v.mean().exp(), 0.0),
        (lambda v: torch.tensor(1.0), 0.0),
    ],
)
def test_the_graph_has_a_factor(of: Callable[[torch.Tensor], torch.Tensor], factor: float) -> None:
    assert factor_from_mean_to_loss(of(torch.ones(3, requires_grad=True) ** 2)) == factor


@pytest.fixture
def merged_batch(tmp_path: Path) -> MergedBatch:
    job = make(tmp_path, passes_of(lambda s: 2))
    return MergedBatch(job, BatchSource(job))


def test_a_copy_computes_the_unscaled_loss_gradient(merged_batch: MergedBatch) -> None:
    model, inputs = torch.nn.Linear(3, 2), torch.ones(4, 3)
    targets = torch.tensor([0, 1, -100, 1])
    parameters = dict(model.named_parameters())

    def taken(reduction: str, of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        merged_batch._heard.clear()
        value = F.cross_entropy(model(inputs), targets, reduction=reduction)
        edge = torch.autograd.graph.get_gradient_edge(value)
        merged_batch.heard(("cross_entropy", reduction, edge, 3))
        return merged_batch.take(ReplayTask(ALL), of(value), parameters)

    plain = taken("mean", lambda v: v)
    scaled = taken("mean", lambda v: v / 12)
    assert (float(plain["kind"]), float(scaled["kind"])) == (1, 1)
    assert torch.equal(plain["weight"], scaled["weight"])
    sums = taken("sum", lambda v: v / 7)
    assert float(sums["kind"]) == 2
    assert torch.allclose(sums["weight"], 3 * plain["weight"])
    other = taken("mean", lambda v: v * model.weight.square().sum())
    assert float(other["kind"]) == 0
    merged_batch._heard.clear()
    own = merged_batch.take(ReplayTask(ALL), (model(inputs) ** 2).mean() / 12, parameters)
    right = torch.autograd.grad((model(inputs) ** 2).mean(), model.weight)[0]
    assert float(own["kind"]) == 1
    assert torch.allclose(own["weight"], right)


def test_interacting_samples(merged_batch: MergedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchSource, "inputs", lambda *_: [torch.zeros(1)])
    tasks = merged_batch.tasks(0, 2)
    pairs = ((0, 0), (1, 0), (0, 1), (1, 1))
    assert [(r.rank, r.draw) for r in tasks[:3]] == [(ALL, 0), (ALL, 1), (ALL, 2)]
    assert tasks[0].pairs == pairs
    assert [r.pairs for r in tasks[3:]] == [pairs[:2], pairs[:1], pairs[1:2]]

    def wrote(value: float) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((2,), value), "kind": torch.tensor(1.0)}

    found: dict[ReplayTask, Any] = {task: wrote(1.0) for task in tasks}
    assert sorted(merged_batch.results(found, 0)) == ["folded/weight", "spread-folded/weight"]
    assert (merged_batch.kind, merged_batch.why) == ("mean", "")
    found[tasks[3]] = wrote(1.1)
    assert merged_batch.results(found, 0) == {}
    assert (
        merged_batch.why
        == "the loss of a larger batch is not the mean of its micro-batches' losses"
    )
    assert merged_batch.tasks(1, 2) == []


def test_a_loaded_batch_stays(merged_batch: MergedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy is forked too late for it. Inputs of one shape are put in all the same."""
    monkeypatch.setattr(BatchSource, "begins_at", lambda _, step: max(0, step - 1))
    for given, why in (
        ([torch.zeros(1)], ""),
        ([None], "at step 1 a batch, padded to its own length, is loaded before the step"),
    ):
        monkeypatch.setattr(BatchSource, "inputs", lambda *_, given=given: given)
        assert merged_batch.tasks(0, 0)
        assert bool(merged_batch.tasks(1, 0)) is not bool(why)
        assert merged_batch.why == why


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"draws": True}, "the forward pass draws random numbers"),
        ({"autocast": "torch.bfloat16"}, "the rounding of autocast depends on the batch shape"),
        ({"rows": ()}, "no samples were seen"),
        ({"rows": ("a", "b")}, "several passes of a step use the same samples"),
    ],
)
def test_reasons_against_one_pass(tmp_path: Path, about: dict[str, Any], why: str) -> None:
    job = make(tmp_path, passes_of(lambda s: 2, **about))
    merged_batch = MergedBatch(job, BatchSource(job))
    assert merged_batch.tasks(0, 2) == []
    assert merged_batch.why == why


def test_passes_of_several_losses_are_no_micro_batches(tmp_path: Path) -> None:
    def tasks_learned_in_turn(facts: Facts) -> None:
        passes_of(lambda s: 2)(facts)
        facts.passes[0] = msgspec.structs.replace(facts.passes[0], losses=facts.a_pass(0).losses)

    job = make(tmp_path, tasks_learned_in_turn)
    merged_batch = MergedBatch(job, BatchSource(job))
    assert merged_batch.tasks(0, 2) == []
    assert merged_batch.why == "the passes of a step compute different losses"


def test_a_job_that_does_not_accumulate_pays_nothing(tmp_path: Path) -> None:
    job = make(tmp_path)
    merged_batch = MergedBatch(job, BatchSource(job))
    assert merged_batch.tasks(0, 2) == []
    assert merged_batch.why == ""
