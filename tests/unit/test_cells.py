"""What the front knows of cells, and who declines them."""

import re
from typing import get_args

import msgspec
import pytest
import torch

from distcheck.contract import BackendAllReduce, CellName, Contract, DDPBuckets, Training, strategy
from distcheck.errors import UsageError
from distcheck.judge.checks.comparison import compare_by_norm, compare_within
from distcheck.judge.oracles.order_exact import expected_gradients
from distcheck.judge.oracles.rounding import interval
from distcheck.judge.oracles.shards import loss_scale_after
from distcheck.plan.case_remarks import why_left_out
from distcheck.plan.cells_to_run import counts_only_if_finished
from distcheck.training.building import open_ingredients
from distcheck.training.loading import load_workload
from distcheck.workloads.cells import BATCH, CELLS
from tests.unit.test_plan import cases, checks, facts_of

SIZES = [(64,) * 4]


def test_the_contract_can_decline_every_cell_and_nothing_else() -> None:
    assert set(get_args(CellName)) == set(CELLS)
    with pytest.raises(ValueError, match="declines names of cells"):
        strategy(declines=("tied",))  # type: ignore[arg-type]


def test_every_cell_is_a_workload_that_says_what_it_is() -> None:
    for name, cell in CELLS.items():
        loaded = load_workload(name)
        assert loaded.own_samples is not None, name
        assert loaded.own_samples().size(train=True) >= BATCH, name
        assert type(loaded.workload).__doc__, name
        assert len(cell.about) < 100, name


def test_thorough_adds_every_cell_once() -> None:
    thorough = cases(thorough=True, worlds=[2, 3], batch=64, without=["sparse"])
    names = [case.workload for case in thorough if case.world == 2]
    assert names == ["exact", "cnn", "composite", "composite", "twelve_steps", *CELLS]
    assert {case.dtype for case in thorough[3:]} >= {"float32"}
    (ragged,) = [c for c in thorough if (c.workload, c.world) == ("ragged_batch", 3)]
    assert (ragged.batch, ragged.steps, ragged.data) == (256, 4, "synthetic")
    assert [c.workload for c in thorough if c.left_out] == ["sparse", "sparse"]
    assert [c.workload for c in cases(thorough=True, workloads=["dropout"])].count("dropout") == 1
    with pytest.raises(UsageError, match="--without 'cnn' is not a cell"):
        cases(without=["cnn"])


def test_a_cell_trains_its_own_steps_however_it_is_asked_for() -> None:
    for thorough in (False, True):
        planned = cases(workloads=[*CELLS], thorough=thorough)
        assert {c.workload: c.steps for c in planned} == {n: c.steps for n, c in CELLS.items()}
    (ragged,) = cases(workloads=["ragged_batch"], steps=2)
    assert ragged.steps == 2
    by_name = {c.workload: c for c in cases(thorough=True, steps=2)}
    assert (by_name["cnn"].steps, by_name["ragged_batch"].steps) == (2, 4)


def test_layers_that_have_nothing_to_say_are_not_owed() -> None:
    def layers(name: str) -> set[str]:
        (case,) = cases(workloads=[name])
        return {layer for check, layer in checks(case) if check == "gradients"}

    assert layers("tied_weights") == {"bitwise", "rounding", "full batch float32"}
    assert layers("mixed_dtypes") == {"bitwise", "rounding"}
    assert layers("loss_scaling") == {"bitwise", "rounding", "full batch float32"}
    assert layers("sparse") == {"full batch float32"}
    assert layers("accumulation") == {"bitwise", "rounding", "full batch float32"}


def test_what_cannot_do_a_cell() -> None:
    def why(name: str, contract: Contract = Contract(), **others: bool) -> str:  # noqa: B008
        (case,) = cases(workloads=[name])
        training = open_ingredients(case, b"", None).training
        facts = msgspec.structs.replace(facts_of(contract, **others), training=training)
        return why_left_out(case, facts, SIZES)

    assert why("resume", own_backward=True, own_update=True) == ""
    assert "its contract declines it" in why("resume", Contract(declines=("resume",)))
    assert why("accumulation", own_backward=True) == ""
    assert "divide into 6 equal" in why(
        "accumulation", Contract(micro_batches=3), own_backward=True
    )
    assert why("loss_scaling", own_backward=True) == ""
    assert "inside the optimizer step" in why("clipping", own_update=True)
    assert "inside the optimizer step" in why("loss_scaling", own_update=True)
    assert why("clipping", Contract(optimizer_state="cut")) == ""
    assert "on their owners" in why("clipping", Contract(gradients="owner"))
    assert why("accumulation", Contract(optimizer_state="cut")) == ""


@pytest.mark.parametrize(
    ("training", "cell"),
    [
        (Training(accumulate=2), "accumulation"),
        (Training(clip_norm=1.0), "clipping"),
        (Training(loss_scale=2.0), "loss_scaling"),
        (Training(resume_before=1), "resume"),
    ],
)
def test_a_training_like_a_cell_is_treated_like_it(training: Training, cell: CellName) -> None:
    def why(contract: Contract, **others: bool) -> str:
        (case,) = cases(workloads=["my.workloads:Mine"])
        facts = msgspec.structs.replace(facts_of(contract, **others), training=training)
        return why_left_out(case, facts, SIZES)

    mesh = Contract(parallel=(("tensor", 4),), optimizer_state="cut", sync="out-of-sight")
    clips = training.clip_norm is not None
    asks = "the loop would clip by the norm of a rank's shards; define clip("
    assert (asks if clips else "in a layout the loop does not accumulate, scale") in why(mesh)
    about = CELLS[cell].about
    assert why(Contract(declines=(cell,))) == f"its contract declines {cell} ({about})"
    assert why(Contract(declines=("sparse",))) == ""
    uneven = why(Contract(micro_batches=3), own_backward=True)
    assert ("runs backward" in uneven) == (cell == "accumulation")
    assert ("inside the optimizer step" in why(Contract(), own_update=True)) == (
        cell in ("clipping", "loss_scaling")
    )
    ingredients = open_ingredients(cases(workloads=[cell])[0], b"", None)
    set_by = [name for name in Training.__struct_fields__
              if getattr(ingredients.training, name) != getattr(Training(), name)]  # fmt: skip
    assert [getattr(training, name) != getattr(Training(), name) for name in set_by] == [True]


def why_overflow(accept: str) -> str:
    (case,) = cases(workloads=["loss_scaling"], accept=accept, steps=4)
    return why_left_out(case, facts_of(Contract()), SIZES)


def test_where_roundings_leave_no_bound_nothing_is_judged() -> None:
    def why(passes: int, contract: Contract = Contract(), **asked: object) -> str:  # noqa: B008
        (case,) = cases(workloads=["my.workloads:Mine"], dtype="float32", batch=300, **asked)
        if "accept" not in asked and contract.wire is None:
            case = msgspec.structs.replace(case, dtype="bfloat16")
        facts = msgspec.structs.replace(facts_of(contract), training=Training(accumulate=passes))
        return why_left_out(case, facts, SIZES)

    assert [bool(why(passes)) for passes in (1, 4, 9, 10)] == [False, False, False, True]
    assert "may have a rounding error as large as the sum itself" in why(64)
    assert "in bfloat16" in why(64, Contract(wire="bfloat16"))
    assert why(64, Contract(wire="float32")) == ""
    assert why(1, accept="quantized:8") == why(2, accept="low-precision:bf16") == ""
    assert "has a bound for one all-reduce per step" in why(2, accept="quantized:8")
    assert [bool(why_overflow(kind)) for kind in ("quantized:8", "low-rank:2", "local-sgd:2")] == [
        True, True, False,
    ]  # fmt: skip
    assert [bool(why(1, worlds=[world])) for world in (118, 119, 300)] == [False, True, True]
    assert why(1, worlds=[128]) == (
        "gradients reduced over 128 ranks in bfloat16 may have a rounding error as large as the "
        "sum itself, so no bound exists"
    )
    assert why(1, Contract(wire="bfloat16"), worlds=[128])
    assert why(1, Contract(wire="float16"), worlds=[128]) == ""
    assert "has a bound for one all-reduce per step" in why(2, accept="low-rank:2")
    assert why(1, accept="low-rank:2") == ""


@pytest.mark.parametrize(
    ("training", "why"),
    [
        ({"accumulate": 2}, "its training is {'accumulate': 2}; expected a"),
        (
            Training(accumulate=0),
            "which the loop does not support: Expected `int` >= 1 - at `$.accumulate`",
        ),
        (Training(clip_norm="2"), "Expected `float | null`, got `str` - at `$.clip_norm`"),  # type: ignore[arg-type]
    ],
)
def test_bad_training_refused(training: object, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ingredients = open_ingredients(cases(workloads=["accumulation"])[0], b"", None)
    monkeypatch.setattr(type(ingredients.loaded.workload), "training", training)
    with pytest.raises(UsageError, match=re.escape(why)):
        _ = ingredients.training


def test_an_infinite_mean_has_no_bound_to_hide_in() -> None:
    shards = [torch.tensor([1.0, 2.0]), torch.tensor([float("inf"), 4.0])]
    known = interval(shards, [0.5, 0.5])
    assert known.mean[0].isinf()
    assert float(known.bound[0]) == 0.0
    assert float(known.bound[1]) > 0.0
    right = torch.tensor([float("inf"), 3.0])
    assert compare_within(right, known.mean, known.bound).ok
    assert not compare_within(torch.tensor([1.0, 3.0]), known.mean, known.bound).ok
    assert not compare_within(torch.tensor([float("nan"), 3.0]), known.mean, known.bound).ok


def test_the_imaginary_part_counts() -> None:
    shards = [torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 + 4j, 1 - 1j])]
    known = interval(shards, [0.5, 0.5])
    right = (shards[0] + shards[1]) / 2
    assert compare_within(right, known.mean, known.bound).ok
    assert compare_within(right, known.mean, known.bound).elements == 2
    wrong = torch.complex(right.real, torch.zeros(2))
    found = compare_within(wrong, known.mean, known.bound)
    assert found.first is not None
    assert found.first.index == (0, 1)
    assert compare_by_norm(right, right, 0.0).ok
    assert not compare_by_norm(wrong, right, 1.0).ok


@pytest.mark.parametrize("world", [3, 5])
def test_orders_run_through_memory(world: int) -> None:
    """A transposed gradient is added up as the contiguous one that lies in the same memory."""
    flat = [torch.randn(35, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    like = torch.zeros(7, 5).t()

    def mean(gradients: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        (found,) = expected_gradients(
            Contract(order=DDPBuckets(), scale="divide-before"), "gloo", [[g] for g in gradients],
            weights=[1.0] * world, step=0, ready_order=[0], like=[like],
        )  # fmt: skip
        assert found is not None
        return found

    plain = mean([g.view(7, 5) for g in flat], torch.zeros(7, 5))
    turned = mean([g.view(7, 5).t().contiguous() for g in flat], like)
    assert torch.equal(turned, plain.t())


def test_a_ddp_that_looks_for_unused_parameters_keeps_their_places() -> None:
    """The zeros in between move the borders of the ring's chunks, and with them the bits."""
    shards = [
        [torch.randn(1000, generator=torch.Generator().manual_seed(r)), None] for r in range(3)
    ]
    like = [torch.zeros(1000, requires_grad=True), torch.zeros(500, requires_grad=True)]

    def mean(order: DDPBuckets, like: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return expected_gradients(
            Contract(order=order, scale="divide-before"), "gloo", shards, weights=[1.0] * 3,
            step=0, ready_order=[0], like=like,
        )  # fmt: skip

    looks = mean(DDPBuckets(rebuilt_at=None), like)
    frozen = mean(DDPBuckets(rebuilt_at=None), [like[0], torch.zeros(500)])
    assert looks[1] is None
    assert looks[0] is not None
    assert frozen[0] is not None
    assert not torch.equal(looks[0], frozen[0])


def test_what_one_rank_alone_has_a_gradient_for_is_a_mean_with_zeros() -> None:
    """A branch that the samples choose: not that of rank 0, and not that of every rank."""
    drawn = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    like = [torch.zeros(1000, requires_grad=True) for _ in range(2)]

    def mean(missing: torch.Tensor | None, order: DDPBuckets | BackendAllReduce) -> list:
        return expected_gradients(
            Contract(order=order, scale="divide-before"), "gloo",
            [[drawn[0], missing], [drawn[1], drawn[2]], [drawn[2], missing]], weights=[1.0] * 3,
            step=0, ready_order=[0], like=like,
        )  # fmt: skip

    for order in (DDPBuckets(rebuilt_at=None), BackendAllReduce()):
        found = mean(None, order)
        for one, other in zip(found, mean(torch.zeros(1000), order), strict=True):
            assert torch.equal(one, other)


def test_a_loss_scale_is_halved_and_doubled_as_torch_does() -> None:
    """Over more steps than it takes to double, with overflows that begin the count anew."""
    scaler = torch.amp.GradScaler("cpu")
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
    scale, in_a_row = torch.tensor(2.0**10), torch.zeros((), dtype=torch.int32)
    finite = [step not in (0, 700, 701, 2702, 4900) for step in range(5000)]
    seen = [2.0**10]
    for is_finite in finite:  # what a GradScaler does in its update()
        overflows, interval = torch.tensor(float(not is_finite)), scaler.get_growth_interval()
        torch._amp_update_scale_(scale, in_a_row, overflows, *factors, interval)
        seen.append(float(scale))
    for step in (0, 1, 2, 701, 702, 2701, 2702, 2703, 4702, 4703, 4704, 4900, 4901, 5000):
        assert loss_scale_after(2.0**10, finite[:step]) == seen[step], step
    assert set(seen) == {2.0**power for power in (10, 9, 8, 7)}


def test_a_hook_divides_the_parts_of_complex_numbers_and_others_the_numbers() -> None:
    """DDP's buckets hold pairs of real numbers; torch's complex division multiplies by 1 / W."""
    shards = [
        torch.randn(500, dtype=torch.complex64, generator=torch.Generator().manual_seed(r))
        for r in range(3)
    ]

    def mean(order: DDPBuckets | BackendAllReduce) -> torch.Tensor:
        (found,) = expected_gradients(
            Contract(order=order, scale="divide-before"), "gloo", [[shard] for shard in shards],
            weights=[1.0] * 3, step=0, ready_order=[0], like=[shards[0]],
        )  # fmt: skip
        assert found is not None
        return found

    apart = mean(DDPBuckets()) != mean(BackendAllReduce())
    assert bool(apart.any())
    parts = [torch.view_as_real(shard) for shard in shards]
    (real,) = expected_gradients(
        Contract(order=DDPBuckets(), scale="divide-before"), "gloo", [[part] for part in parts],
        weights=[1.0] * 3, step=0, ready_order=[0], like=[parts[0]],
    )  # fmt: skip
    assert real is not None
    assert torch.equal(torch.view_as_real(mean(DDPBuckets())), real)


@pytest.mark.parametrize(
    ("asked", "world", "batch"), [(252, 3, 255), (256, 3, 256), (5001, 5, 256), (8, 4, 256)]
)
def test_a_cell_has_equal_shards_where_the_run_has(asked: int, world: int, batch: int) -> None:
    """Code for equal shards alone is right in a training that has no others."""
    (absent,) = (c for c in cases(batch=asked, worlds=[world]) if counts_only_if_finished(c))
    assert absent.batch == batch
    by_name = {c.workload: c for c in cases(batch=asked, worlds=[world], thorough=True)}
    assert (by_name["tied_weights"].batch, by_name["two_epochs"].batch) == (batch, 256)


def test_a_workload_that_normalizes_needs_two_samples_a_rank() -> None:
    """BatchNorm raises for one; the batch that is named gives enough."""
    facts = facts_of(Contract())
    (case,) = cases(workloads=["composite"], dtype="float32", batch=3, worlds=[3])
    assert why_left_out(case, facts, [[1, 1, 1]]) == (
        "each rank must have 2 samples; pass --batch 6"
    )
    assert why_left_out(case, facts, [[2, 2, 2]]) == ""
